#!/usr/bin/env python3
"""Everything that is to be measured on a machine of several GPUs, in one command. Called by `./dev
gpu-cluster-bench`; needs Python 3.8, the programs of a build folder, the driver and NCCL, and no compiler.

The work is cut into steps. Each has a folder under --out with its command, its log, its results and, once it is
over, step.json. A step that succeeded is not repeated; one that failed, hung or found no time left is tried again
by the next call. A step that is not done within its limit is ended, with everything it started, and the next one
goes on. In the end all results there are, of this call and of earlier ones, are put together: summary.md,
summary.json, and a machine profile.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

OPERATORS = {
    "ar": "GEMM + all-reduce",
    "rs": "GEMM + reduce-scatter",
    "a2a": "GEMM + all-to-all",
    "ag": "all-gather + GEMM",
}
PROGRAMS = ("bench/gpu/cluster_bench", "tests/gpu/flashoverlap_gpu_test")
# The targets: least speed-up over serial, by operator, for the shapes that they are set for.
TARGETS = [
    ("ag", "m >= 4096", lambda c: c["m"] >= 4096, 1.30),
    ("rs", "all", lambda c: True, 1.20),
    ("ar", "k per rank 1024", lambda c: c["k"] == 1024, 1.20),
    ("ar", "k per rank 3584", lambda c: c["k"] == 3584, 1.50),
]
NEVER_BELOW = 0.98
SHARE_OF_BOUND = 0.80
PREDICTION_ERROR = 0.034
# Tests that also work with one process per GPU.
PROCESS_TESTS = "collectives,random_shapes_nccl,defaults,edges,all_gather,-one_rank"
# Faults on purpose take minutes of waiting for time-outs: `gpu_test nccl_failures` has them.
ALL_TESTS = "-nccl_failures,-without_one_rank"


def shapes(world_size):
    """m x n x k (k per rank) of the table, the most telling first: a run may end before the last."""
    table = []
    for m in (4096, 8192, 2048, 16384, 1024):
        for k in (2048, 3584, 1024):
            table.append((m, 8192, k))
        if m == 4096:
            table.append((4096, 12288, 49152 // world_size))
    return table


class Step:
    """One command with a time limit. `processes`: so many copies, one per GPU, that find each other."""

    def __init__(self, name, command, limit_s, processes=0, env=None):
        self.name = name
        self.command = [str(word) for word in command]
        self.limit_s = limit_s
        self.processes = processes
        self.env = dict(env or {})


class Runner:
    """`grace_s`: what the other processes of a step get, once one has failed, to say what they saw."""

    def __init__(self, out, budget_s, say=print, clock=time.monotonic, grace_s=10):
        self.out = Path(out)
        self.deadline = clock() + budget_s
        self.say = say
        self.clock = clock
        self.grace_s = grace_s

    def folder(self, step):
        return self.out / step.name

    def record(self, step):
        """What step.json says; None where there is none, or one that was cut off in writing."""
        try:
            return json.loads((self.folder(step) / "step.json").read_text())
        except (OSError, ValueError):
            return None

    def is_done(self, step):
        record = self.record(step)
        return record is not None and record.get("status") == "ok"

    def run(self, step):
        """Runs the step unless it is done or there is no time left. Returns its status."""
        if self.is_done(step):
            self.say(f"{step.name}: done already")
            return "ok"
        left = self.deadline - self.clock()
        if left < min(5, step.limit_s):
            self.say(f"{step.name}: no time left; call again with the same --out")
            return "not run"
        folder = self.folder(step)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        limit = min(step.limit_s, left)
        begin = self.clock()
        status, detail = self._execute(step, folder, limit)
        if status == "ok" and any(says_no_device(path) for path in folder.glob("log*.txt")):
            status, detail = "failed", "the program found no CUDA device"
        record = {
            "step": step.name,
            "status": status,
            "detail": detail,
            "seconds": round(self.clock() - begin, 2),
            "limit_s": round(limit, 2),
            "command": step.command,
            "processes": step.processes,
            "environment": step.env,
        }
        write_json(folder / "step.json", record)
        self.say(f"{step.name}: {status}{': ' + detail if detail else ''} ({record['seconds']:.1f} s)")
        return status

    def _execute(self, step, folder, limit):
        ranks = max(1, step.processes)
        port = free_port() if step.processes else 0
        started = []
        try:
            for rank in range(ranks):
                env = {**os.environ, **step.env, "OUT": str(folder)}
                if step.processes:
                    env.update(
                        FLASHOVERLAP_RANK=str(rank),
                        FLASHOVERLAP_WORLD_SIZE=str(ranks),
                        FLASHOVERLAP_LOCAL_RANK=str(rank),
                        FLASHOVERLAP_LOCAL_SIZE=str(ranks),
                        FLASHOVERLAP_RENDEZVOUS=f"127.0.0.1:{port}",
                    )
                name = f"log.{rank}.txt" if step.processes else "log.txt"
                with open(folder / name, "wb") as log:
                    # A session of its own, so that all that it starts can be ended with it.
                    started.append(
                        subprocess.Popen(
                            step.command,
                            cwd=folder,
                            env=env,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
        except OSError as error:
            end_all(started)
            return "failed", f"cannot start {step.command[0]}: {error.strerror}"
        return self._wait(started, limit)

    def _wait(self, started, limit):
        end = self.clock() + limit
        failed = False
        try:
            while True:
                codes = [process.poll() for process in started]
                if all(code is not None for code in codes):
                    break
                if not failed and any(code not in (None, 0) for code in codes):
                    failed = True
                    end = min(end, self.clock() + self.grace_s)
                if self.clock() >= end:
                    end_all(started)
                    if not failed:
                        return "timed out", f"ended after its limit of {limit:.0f} s"
                    break
                time.sleep(0.02)
        except BaseException:
            end_all(started)
            raise
        end_all(started)  # children that outlived their parents
        bad = [f"rank {r}: exit code {p.returncode}" for r, p in enumerate(started) if p.returncode != 0]
        if len(started) == 1 and bad:
            bad = [f"exit code {started[0].returncode}"]
        return ("failed", "; ".join(bad)) if bad else ("ok", "")


def says_no_device(path):
    """The programs end with exit code 0 where there is no device, so that tests pass there."""
    return any(line.startswith("skipped: no CUDA device") for line in path.read_text(errors="replace").splitlines())


def end_all(processes):
    """Ends processes with everything in their sessions."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    for process in processes:
        process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_json(path, value):
    """Whole or not at all, so that a call that is cut off leaves nothing that looks done."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def json_lines(path):
    """Objects of a file with one a line; a last line that was cut off is left out."""
    values = []
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return values
    for line in lines:
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values


# --- the steps --------------------------------------------------------------------------------------------------------


def plan_steps(options, gpus):
    """The steps in the order of their importance. `gpus`: devices of the machine."""
    build = Path(options.build)
    bench, test = (build / program for program in PROGRAMS)
    worlds = options.worlds
    place = ["--rehearse"] if options.rehearse else []
    devices = [] if options.rehearse else ["--devices", "all"]
    steps = [
        Step("topology", ["bash", "-c", TOPOLOGY], 30),
        Step("devices", [bench, "topology", "--json", "devices.json"], 30),
        Step("tests-threads", [test, *devices, ALL_TESTS], 150),
    ]
    for world in worlds:
        steps.append(curve_step(bench, world, place))
    for world in worlds:
        for operator in ("ag", "ar", "rs"):
            listed = ",".join("x".join(map(str, shape)) for shape in shapes(world))
            steps.append(
                Step(
                    f"table-{world}-{operator}",
                    [bench, "table", "--ranks", world, *place, "--ops", operator, "--shapes", listed]
                    + ["--budget-s", options.table_s, "--json", "results.jsonl", "--trace", "trace.json"],
                    options.table_s + 20,
                )
            )
    for world in worlds:
        if options.rehearse:
            continue  # processes cannot share a GPU's SM partitions
        steps.append(Step(f"tests-processes-{world}", [test, PROCESS_TESTS], 60, processes=world))
    return steps


TOPOLOGY = """
if command -v nvidia-smi > /dev/null; then
  nvidia-smi -L; nvidia-smi topo -m; nvidia-smi nvlink --status || true
  nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit,memory.total --format=csv
else
  echo 'no nvidia-smi here'
fi
"""


def curve_step(bench, world, place):
    return Step(
        f"curves-{world}",
        [bench, "curves", "--ranks", world, *place, "--sms-communication", "24,16,8", "--json", "profile.json"],
        45,
    )


# --- what came of them ------------------------------------------------------------------------------------------------


def merge_profiles(profiles):
    """One machine profile of those that were measured for each world size. They describe the same machine; the
    first says what it is, the curves are put one after the other."""
    merged = None
    for profile in profiles:
        if merged is None:
            merged = json.loads(json.dumps(profile))
            continue
        for field in ("schema", "units"):
            if merged[field] != profile[field]:
                raise ValueError(
                    f"profiles differ in {field}: {merged[field]} and {profile[field]}; they are not of one machine"
                )
        if merged["provenance"]["device"] != profile["provenance"]["device"]:
            raise ValueError(
                f"profiles of {merged['provenance']['device']} and {profile['provenance']['device']} cannot be merged"
            )
        known = {curve_key(curve) for curve in merged.get("curves", [])}
        for curve in profile.get("curves", []):
            if curve_key(curve) not in known:
                merged.setdefault("curves", []).append(curve)
        sources = merged["provenance"].setdefault("sources", [])
        sources += [s for s in profile["provenance"].get("sources", []) if s not in sources]
    return merged


def curve_key(curve):
    return (curve["collective"], curve["world_size"], curve["units"], curve.get("dtype", ""))


def case_figures(case):
    """Derived numbers of one measured case. bound: what no overlap can beat, serial without the shorter of GEMM
    and communication."""
    bound_us = case["serial_us"] - min(case["cublas_us"], case["communication_us"])
    speedup = case["serial_us"] / case["overlapped_us"]
    best = case["serial_us"] / bound_us if bound_us > 0 else float("inf")
    figures = {"bound_us": bound_us, "speedup": speedup, "share": speedup / best}
    if case.get("predicted_us"):
        figures["prediction_error"] = abs(case["predicted_us"] - case["overlapped_us"]) / case["overlapped_us"]
    return figures


def render_table(cases):
    head = (
        "| ranks | operator | m x n x k per rank | cuBLAS | NCCL | serial | overlapped | speed-up | bound | share of bound "
        "| method | predicted | error % | library default | wrong |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    order = {name: i for i, name in enumerate(OPERATORS)}
    rows = []
    for case in sorted(cases, key=lambda c: (c["ranks"], order.get(c["op"], 99), c["m"], c["n"], c["k"])):
        figures = case_figures(case)
        predicted = f"{case['predicted_us']:.0f}" if case.get("predicted_us") else "-"
        error = f"{100 * figures['prediction_error']:.1f}" if "prediction_error" in figures else "-"
        rows.append(
            f"| {case['ranks']} | {OPERATORS.get(case['op'], case['op'])} | {case['m']}x{case['n']}x{case['k']} "
            f"| {case['cublas_us']:.0f} | {case['communication_us']:.0f} | {case['serial_us']:.0f} "
            f"| {case['overlapped_us']:.0f} | {figures['speedup']:.3f} | {figures['bound_us']:.0f} "
            f"| {figures['share']:.2f} | {case['method']} | {predicted} | {error} | {case['default_us']:.0f} "
            f"| {case['wrong']} |"
        )
    return head + "\n".join(rows) + ("\n" if rows else "")


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def judge(cases):
    """The targets against the cases there are: (what, target, measured, verdict)."""
    rows = []
    for operator, where, applies, least in TARGETS:
        values = [case_figures(c)["speedup"] for c in cases if c["op"] == operator and applies(c)]
        rows.append(verdict(f"{OPERATORS[operator]}, {where}: speed-up, median", f">= {least:.2f}", values, least))
    speedups = [case_figures(c)["speedup"] for c in cases]
    rows.append(verdict("any case: speed-up, worst", f">= {NEVER_BELOW}", speedups, NEVER_BELOW, pick=min))
    shares = [case_figures(c)["share"] for c in cases]
    rows.append(verdict("share of the bound, median", f">= {SHARE_OF_BOUND}", shares, SHARE_OF_BOUND))
    errors = [f["prediction_error"] for f in map(case_figures, cases) if "prediction_error" in f]
    row = verdict("prediction error, mean", f"<= {PREDICTION_ERROR}", errors, None, pick=lambda v: sum(v) / len(v))
    if errors:
        row = row[:3] + ("met" if sum(errors) / len(errors) <= PREDICTION_ERROR else "missed",)
    rows.append(row)
    rows.append(("MoE layer: speed-up", ">= 1.73", "-", "not on GPUs yet"))
    return rows


def verdict(what, target, values, least, pick=median):
    if not values:
        return (what, target, "-", "not measured")
    value = pick(values)
    return (what, target, f"{value:.3f} of {len(values)}", "" if least is None else ("met" if value >= least else "missed"))


def summarise(runner, steps, options):
    """summary.json, summary.md and profile.json from what lies in the step folders."""
    records = [runner.record(step) or {"step": step.name, "status": "not run", "detail": ""} for step in steps]
    cases = []
    for step in steps:
        if step.name.startswith("table-"):
            cases += json_lines(runner.folder(step) / "results.jsonl")
    profiles = []
    for step in steps:
        path = runner.folder(step) / "profile.json"
        if step.name.startswith("curves-") and runner.is_done(step) and path.exists():
            profiles.append(json.loads(path.read_text()))
    merged = merge_profiles(profiles)
    if merged is not None:
        write_json(runner.out / "profile.json", merged)
    rows = judge(cases)
    summary = {
        "rehearsal": bool(options.rehearse),
        "steps": records,
        "cases": [{**case, **case_figures(case)} for case in cases],
        "targets": [dict(zip(("what", "target", "measured", "verdict"), row)) for row in rows],
    }
    write_json(runner.out / "summary.json", summary)
    (runner.out / "summary.md").write_text(summary_text(runner, records, cases, rows, options))
    return summary


def summary_text(runner, records, cases, rows, options):
    text = "# GPU cluster benchmark" + (" (a rehearsal: one GPU stands for all ranks)" if options.rehearse else "")
    text += f"\n\n    {' '.join(options.command)}\n\n## Steps\n| step | status | s | |\n|---|---|---|---|\n"
    for record in records:
        seconds = f"{record['seconds']:.1f}" if "seconds" in record else ""
        text += f"| {record['step']} | {record['status']} | {seconds} | {record.get('detail', '')} |\n"
    text += (
        "\n## Operators\nbf16; us, the slowest rank, medians of batches, serial and overlapped in turn in one run. "
        "cuBLAS and NCCL: the parts of serial, alone. Bound: serial without the shorter of them. Predicted: of the "
        "chosen method, from the GEMM alone and the collective's curve.\n\n"
    )
    text += render_table(cases)
    text += "\n## Targets\n| what | target | measured | |\n|---|---|---|---|\n"
    text += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    for name in ("topology/log.txt", "devices/log.txt"):
        path = runner.out / name
        if path.exists():
            text += f"\n## {name}\n```\n{path.read_text(errors='replace').strip()}\n```\n"
    return text


# --- the command ------------------------------------------------------------------------------------------------------


def parse_arguments(words):
    parser = argparse.ArgumentParser(
        prog="gpu-cluster-bench", description="Measures a machine of several GPUs; see the head of this script."
    )
    parser.add_argument("--build", default="build/cuda", help="build folder with the programs (default: %(default)s)")
    parser.add_argument("--out", default="gpu-cluster", help="where results go, and are looked for (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=520, help="no step begins or goes on after so many seconds")
    parser.add_argument("--table-s", type=int, default=22, help="of each operator and number of ranks (default: %(default)s)")
    parser.add_argument("--rehearse", type=int, default=0, metavar="RANKS", help="so many ranks on one GPU")
    parser.add_argument("--ranks", default="", help="numbers of ranks, e.g. 2,4 (default: 2, 4, 8 up to the GPUs)")
    parser.add_argument("--only", default="", help="only steps whose name begins with one of these, e.g. table-4,curves")
    parser.add_argument("--pack", metavar="DIR", help="copy what is needed of --build to DIR, to be carried; run nothing")
    parser.add_argument("--list", action="store_true", help="print the steps, run none")
    options = parser.parse_args(words)
    options.command = ["./dev", "gpu-cluster-bench", *words]
    if options.rehearse == 1 or options.rehearse < 0:
        parser.error(f"--rehearse {options.rehearse}: at least 2 ranks")
    return options


def choose_worlds(options, gpus):
    if options.rehearse:
        return [options.rehearse]
    if options.ranks:
        worlds = [int(part) for part in options.ranks.split(",")]
        for world in worlds:
            if not 2 <= world <= gpus:
                raise SystemExit(f"gpu-cluster-bench: --ranks {world}: this machine has {gpus} GPUs; 2 to {gpus}")
        return worlds
    worlds = [world for world in (8, 4, 2) if world <= gpus]
    if not worlds:
        raise SystemExit(
            f"gpu-cluster-bench: {gpus} GPU here; it takes at least 2, or --rehearse 2 for two ranks on one"
        )
    return worlds


def count_gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def find_programs(options):
    missing = [path for path in PROGRAMS if not os.access(Path(options.build) / path, os.X_OK)]
    if missing:
        raise SystemExit(
            f"gpu-cluster-bench: {options.build} has no {' and no '.join(missing)}: build it where nvcc is "
            "(./dev build cuda), carry the folder here, and name it with --build"
        )


def use_libraries_of(folder):
    """Libraries that the machine lacks may lie in the build folder itself."""
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ["LD_LIBRARY_PATH"] = ":".join(paths)
    if (folder / "libnccl.so.2").exists():
        os.environ.setdefault("FLASHOVERLAP_NCCL_LIBRARY", str(folder / "libnccl.so.2"))


def pack(build, folder):
    """Copies what a GPU machine needs of a build folder, without symbols, to be carried there."""
    folder = Path(folder)
    libraries = {}
    for program in PROGRAMS:
        target = folder / program
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(build) / program, target)
        if shutil.which("strip"):
            subprocess.run(["strip", str(target)], check=True)
        listed = subprocess.run(["ldd", str(target)], capture_output=True, text=True, check=True).stdout
        libraries.update(line.split()[::2] for line in listed.splitlines() if "=> /" in line)
    named = os.environ.get("FLASHOVERLAP_NCCL_LIBRARY")
    if named:
        libraries["libnccl.so.2"] = named
    for name, path in sorted(libraries.items()):
        # The C library is the machine's own, and so are the driver and CUDA.
        if not name.startswith(("libc.", "libm.", "libdl.", "librt.", "libpthread.", "ld-", "libcu", "libresolv.")):
            shutil.copy2(path, folder / name)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB; there: ./dev gpu-cluster-bench --build {folder}")


def main(words):
    options = parse_arguments(words)
    if options.pack:
        find_programs(options)
        pack(options.build, options.pack)
        return 0
    gpus = count_gpus()
    if gpus == 0 and not options.list:
        print("skipped: no CUDA device")
        return 0
    if not options.list:
        find_programs(options)
    options.build = Path(options.build).resolve()
    use_libraries_of(options.build)
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    options.worlds = choose_worlds(options, gpus if gpus else 8)
    steps = plan_steps(options, gpus)
    wanted = [part for part in options.only.split(",") if part]
    chosen = [step for step in steps if not wanted or any(step.name.startswith(part) for part in wanted)]
    if options.list:
        for step in chosen:
            copies = f" x {step.processes} processes" if step.processes else ""
            print(f"{step.name} (at most {step.limit_s} s{copies}): {' '.join(' '.join(step.command).split())[:160]}")
        return 0
    Path(options.out).mkdir(parents=True, exist_ok=True)
    runner = Runner(Path(options.out).resolve(), options.budget_s, say=lambda text: print(text, flush=True))
    statuses = [runner.run(step) for step in chosen]
    summary = summarise(runner, steps, options)
    print(f"{runner.out / 'summary.md'}: {len(summary['cases'])} cases")
    bad = [step.name for step, status in zip(chosen, statuses) if status != "ok"]
    if bad:
        print(f"not done: {', '.join(bad)}; the same command tries these again", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
