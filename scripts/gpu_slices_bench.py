#!/usr/bin/env python3
"""Operators in slices and layers of them on GPUs: exposed communication and share of the bound, tail-free beside
serial, slices with a collective each, and the decomposed form. Needs Python 3.8 and `flashoverlap` with CUDA.

    scripts/gpu_slices_bench.py --program build/cuda/cli/flashoverlap --out results

Links are paced such that a slice's communication takes --ratio of its computation, which an operator's run as fast as
the copies go tells: the operator's own, or, of a layer, that of its exchange with least to hide behind. So one GPU on
which all ranks have SMs of their own shows what a link of any speed would (docs/benchmarks.md). What is in --out
already is not run again; the table of all results is printed, and written to slices.md.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

BYTES = 2  # of an element
# Run as `-m M -n N -k K`.
OPERATORS = ("all-gather-gemm", "sharded-weight-gemm", "gradient-reduce-scatter", "gemm-reduce-scatter",
             "gemm-all-to-all-heads", "all-to-all-gemm")
LAYERS = ("mlp-tpsp", "linear-dp", "attention-tpsp", "attention-up")


def operator_arguments(name, shape):
    m, n, k = shape
    method = ["--method", "tail-free"] if name == "gemm-reduce-scatter" else []
    return ["run", name, *method, "-m", m, "-n", n, "-k", k]


def layer_arguments(name, tokens, hidden):
    if name == "mlp-tpsp":
        return ["run", name, "--tokens", tokens, "--hidden", hidden, "--inner", 4 * hidden]
    if name == "linear-dp":
        return ["run", name, "--samples", tokens, "--in", hidden, "--out", hidden]
    return ["run", name, "--tokens", tokens, "--heads", hidden // 128, "--head-size", 128]


def hardest_exchange(layer, ranks, tokens, hidden):
    """The operator of the layer, with its shape, that has least computation for what it sends."""
    return {
        "mlp-tpsp": ("all-gather-gemm", (tokens, 4 * hidden // ranks, hidden)),
        "linear-dp": ("sharded-weight-gemm", (tokens, hidden, hidden)),
        "attention-tpsp": ("all-gather-gemm", (tokens, 3 * hidden // ranks, hidden)),
        "attention-up": ("gemm-all-to-all-heads", (tokens, 3 * hidden, hidden)),
    }[layer]


def wire_elements(operator, ranks, shape):
    """What the busiest rank sends in one call."""
    m, n, k = shape
    others = (ranks - 1) / ranks
    return others * {
        "all-gather-gemm": m * k,
        "sharded-weight-gemm": n * k,
        "gradient-reduce-scatter": m * n,
        "gemm-reduce-scatter": m * n,
        "gemm-all-to-all-heads": m * n / ranks,
        "all-to-all-gemm": m * k / ranks,
    }[operator]


def paced_gbps(elements, computation_us, ranks, ratio, latency_us):
    """As `matching_link` of the command: the link on which a slice's communication takes `ratio` of its computation."""
    transfer_us = ratio * computation_us * (ranks - 1) / ranks - ranks * latency_us
    return elements * BYTES / max(1.0, transfer_us) / 1e3


def run(command, path, limit_s):
    """The JSON that `command` prints, which is kept at `path`; None where it failed."""
    if path.exists():
        return json.loads(path.read_text())
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"# {path.stem}: not done within {limit_s} s", flush=True)
        return None
    seconds = time.monotonic() - begin
    if done.returncode != 0:
        print(f"# {path.stem}: exit code {done.returncode} after {seconds:.1f} s: {done.stderr.strip()}", flush=True)
        return None
    path.write_text(done.stdout)
    print(f"# {path.stem}: {seconds:.1f} s", flush=True)
    return json.loads(done.stdout)


def command(arguments, options):
    words = [options.program, *map(str, arguments), "--backend", "cuda", "--dtype", "bf16", "--ranks",
             str(options.ranks), "--comm", options.comm, "--json"]
    if options.devices:
        words += ["--devices", options.devices]
    if options.sms_communication is not None:
        words += ["--sms-communication", str(options.sms_communication)]
    return words


def matching_gbps(operator, shape, options):
    """The link for it, by its GEMM on unpaced links; None where that run failed."""
    path = Path(options.out) / f"{operator}-{'x'.join(map(str, shape))}-free.json"
    free = run([*command(operator_arguments(operator, shape), options), "--link-gbps", "0", "--iterations", "3"], path,
               options.limit_s)
    if free is None:
        return None
    elements = wire_elements(operator, options.ranks, shape)
    return paced_gbps(elements, free["gemm_us"], options.ranks, options.ratio, options.latency_us)


def measure(case, options):
    """The result on the paced link, with what it was paced to; None where a run failed."""
    if case in LAYERS:
        arguments = layer_arguments(case, options.tokens, options.hidden)
        hardest = hardest_exchange(case, options.ranks, options.tokens, options.hidden)
    else:
        arguments = operator_arguments(case, options.shape)
        hardest = (case, options.shape)
    gbps = matching_gbps(*hardest, options)
    if gbps is None:
        return None
    paced = ["--link-gbps", f"{gbps:.4g}", "--link-latency-us", options.latency_us, "--iterations", options.iterations]
    words = [*command(arguments, options), *map(str, paced), "--decomposed"]
    if options.trace:
        words += ["--trace", str(Path(options.out) / f"{case}-trace.json")]
    return run(words, Path(options.out) / f"{case}-paced.json", options.limit_s)


def row(case, result):
    def cell(key, scale=1.0, digits=0):
        value = result.get(key)
        return "-" if value is None else f"{value * scale:.{digits}f}"

    computation = "gemm_us" if "gemm_us" in result else "computation_us"
    cells = [f"`{case}`", cell(computation), cell("communication_us"), cell("serial_us"), cell("sliced_us"),
             cell("decomposed_us"), cell("overlap_us"), cell("exposed_share", 100, 1),
             cell("decomposed_exposed_share", 100, 1), cell("sliced_exposed_share", 100, 1), cell("bound_share", 1, 2)]
    return "| " + " | ".join(cells) + " |"


def table(results):
    head = ["case", "computation", "communication", "serial", "slices", "decomposed", "tail-free", "exposed, %",
            "decomposed, %", "slices, %", "of the bound"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + [row(case, result) for case, result in results]) + "\n"


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/cuda/cli/flashoverlap")
    parser.add_argument("--out", default="gpu-slices")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--devices", default="", help="of the ranks; when not given, one each, or all on device 0")
    parser.add_argument("--comm", default="local", choices=("local", "copy-engine"), help="NCCL cannot be paced")
    parser.add_argument("--sms-communication", type=int)
    parser.add_argument("--ratio", type=float, default=0.9)
    parser.add_argument("--latency-us", type=float, default=2)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--trace", action="store_true", help="write a trace of one paced call of each case, too")
    parser.add_argument("--shape", default="8192x4096x4096", help="MxNxK of the operators",
                        type=lambda text: tuple(int(size) for size in text.split("x")))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--cases", default=",".join(OPERATORS + LAYERS))
    parser.add_argument("--limit-s", type=float, default=60, help="of one run of the command")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    results = []
    wanted = options.cases.split(",")
    for case in wanted:
        if case not in OPERATORS + LAYERS:
            sys.exit(f"--cases: '{case}' is none of {', '.join(OPERATORS + LAYERS)}")
        result = measure(case, options)
        if result is not None:
            results.append((case, result))
    text = table(results)
    (Path(options.out) / "slices.md").write_text(text)
    print(text)
    return 0 if len(results) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
