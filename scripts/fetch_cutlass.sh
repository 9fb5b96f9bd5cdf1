#!/bin/sh
# Puts the CUTLASS headers (Python package nvidia-cutlass 4.2) into .deps/cutlass/include, where the build looks for
# them unless CUTLASS_DIR names another copy. Needs pip; does nothing when the headers are there already.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
target="$root/.deps/cutlass"
version='4.2.*'

if [ -n "${CUTLASS_DIR:-}" ]; then
  [ -f "$CUTLASS_DIR/include/cutlass/cutlass.h" ] || {
    echo "fetch_cutlass: CUTLASS_DIR=$CUTLASS_DIR has no include/cutlass/cutlass.h" >&2
    exit 1
  }
  exit 0
fi
[ -f "$target/include/cutlass/cutlass.h" ] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --no-deps --dest "$work" "nvidia-cutlass==$version"
python3 - "$work" "$target" <<'PY'
import pathlib, sys, zipfile

work, target = map(pathlib.Path, sys.argv[1:])
prefix = "cutlass_library/source/"
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    for name in wheel.namelist():
        if name.startswith((prefix + "include/", prefix + "LICENSE")) and not name.endswith("/"):
            path = target / name[len(prefix):]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wheel.read(name))
PY
[ -f "$target/include/cutlass/cutlass.h" ] || {
  echo "fetch_cutlass: the package holds no include/cutlass/cutlass.h" >&2
  exit 1
}
