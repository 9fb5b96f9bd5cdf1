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

from gpu_cluster_results import summarise, write_json

PROGRAMS = ("bench/gpu/cluster_bench", "tests/gpu/flashoverlap_gpu_test")
# Tests that also work with one process per GPU.
PROCESS_TESTS = (
    "collectives,messages,calls_that_do_not_match,random_shapes,defaults,edges,all_gather,tail_free,moe_layer,-one_rank"
)
PROCESS_SHAPES = "4096x8192x2048,4096x8192x3584,8192x8192x2048"
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
        listed = ",".join("x".join(map(str, shape)) for shape in shapes(world))
        ways = ["--ways", options.ways] if options.ways else []
        steps.append(
            Step(
                f"table-{world}",
                [bench, "table", "--ranks", world, *place, "--ops", "ag,ar,rs", "--shapes", listed, *ways]
                + ["--budget-s", options.table_s, "--json", "results.jsonl", "--trace", "trace.json"],
                options.table_s + 30,
            )
        )
    for world in worlds:
        if options.rehearse:
            continue  # processes cannot share a GPU's SM partitions
        steps.append(Step(f"tests-processes-{world}", [test, PROCESS_TESTS], 90, processes=world))
        table = [bench, "table", "--ranks", world, "--ops", "ag,ar,rs", "--shapes", PROCESS_SHAPES, "--budget-s", 40]
        steps.append(Step(f"processes-table-{world}", [*table, "--json", "results.jsonl"], 70, processes=world))
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


# --- the command ------------------------------------------------------------------------------------------------------


def parse_arguments(words):
    parser = argparse.ArgumentParser(
        prog="gpu-cluster-bench", description="Measures a machine of several GPUs; see the head of this script."
    )
    parser.add_argument("--build", default="build/cuda", help="build folder with the programs (default: %(default)s)")
    parser.add_argument("--out", default="gpu-cluster", help="where results go, and are looked for (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=520, help="no step begins or goes on after so many seconds")
    parser.add_argument("--table-s", type=int, default=90, help="of the table for each number of ranks (default: %(default)s)")
    parser.add_argument("--ways", default="", help="communicators and SMs to choose among, as cluster_bench has them")
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
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")]), "/usr/local/cuda/lib64"]
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
