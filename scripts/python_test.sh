#!/usr/bin/env bash
# The Python package: checked, built as a wheel, installed and tested in virtual environments. Called by `./dev python-test`.
#
#   python_test.sh [--frameworks] [ARGS]   ARGS go to pytest: -k NAME, -x, …
#   python_test.sh --environment           only makes build/python/venv, with what builds and checks the package
#
# --frameworks also installs JAX and PyTorch, which on Linux brings some 3 GB of CUDA libraries. What cannot be installed is
# said, and its tests are skipped and counted; without --frameworks they run where the environment has the framework already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
folder=$root/build/python
venv=$folder/venv

say() { echo "python-test: $*" >&2; }

frameworks=no
if [[ ${1:-} == --frameworks ]]; then
  frameworks=yes
  shift
fi

# pip_install SECONDS PYTHON ARGS…: package hosts fail now and then, so three tries within the time.
pip_install() {
  local end=$((SECONDS + $1)) python=$2 try
  shift 2
  for try in 1 2 3; do
    if ((SECONDS < end)) && timeout $((end - SECONDS)) "$python" -m pip install -q --disable-pip-version-check "$@"; then
      return 0
    fi
  done
  return 1
}

make_environment() { # FOLDER
  if [[ ! -x $1/bin/python ]]; then
    python3 -m venv "$1"
  fi
}

say "environment"
mkdir -p "$folder"
make_environment "$venv"
pip_install 600 "$venv/bin/python" -r python/requirements-test.txt
export PATH=$venv/bin:$PATH
if [[ ${1:-} == --environment ]]; then
  exit 0
fi

install_frameworks() {
  local framework
  for framework in jax torch; do
    say "installing $framework"
    pip_install 600 "$venv/bin/python" "$framework" || say "$framework cannot be installed here: its tests are skipped"
  done
}

# While the wheel is compiled, which needs no network: they are large.
installing=
if [[ $frameworks == yes ]]; then
  install_frameworks &
  installing=$!
  trap 'kill "$installing" 2> /dev/null || true' EXIT
fi

say "format and lint"
ruff format --check python
ruff check python

say "wheel"
# The flags of the release preset, so that ccache has what that has compiled.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
if command -v ccache > /dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi
rm -rf "$folder/wheels"
pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$folder/wheels" . \
  --config-settings=cmake.define.FLASHOVERLAP_WERROR=ON

say "types"
# The wheel, with the generated stub, but not installed: mypy takes what lies beside it in site-packages for ours.
rm -rf "$folder/typed"
python -m zipfile -e "$folder"/wheels/flashoverlap-*.whl "$folder/typed"
(cd "$folder/typed" && mypy --config-file "$root/pyproject.toml" flashoverlap)

say "a fresh environment with the wheel and NumPy: the example of the README"
rm -rf "$folder/fresh"
make_environment "$folder/fresh"
pip_install 300 "$folder/fresh/bin/python" numpy "$folder"/wheels/flashoverlap-*.whl
sed -n '/^```python$/,/^```$/p' README.md | grep -v '^```' > "$folder/readme.py"
(cd "$folder" && timeout 120 fresh/bin/python readme.py)

if [[ -n $installing ]]; then
  say "waiting for the frameworks"
  wait "$installing"
fi
pip_install 120 "$venv/bin/python" --force-reinstall --no-deps "$folder"/wheels/flashoverlap-*.whl

say "tests"
export PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
(cd python/tests && timeout 1200 pytest -q -rs -p no:cacheprovider "$@")
