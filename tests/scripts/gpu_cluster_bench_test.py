#!/usr/bin/env python3
"""scripts/gpu_cluster_bench.py with stand-ins for the steps: what is done is not repeated, what fails or hangs is
ended, reported and tried again, and what came of all of them is put together."""

import json
import os
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_cluster_bench as bench  # noqa: E402
import gpu_cluster_results as results  # noqa: E402


def shell(name, text, limit_s=60, processes=0):
    return bench.Step(name, ["bash", "-c", text], limit_s, processes)


def is_alive(pid):
    """Whether the process is there and not just waiting to be collected by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class RunnerTest(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)
        self.out = Path(self._folder.name) / "out"
        self.said = []

    def runner(self, budget_s=1000, **options):
        return bench.Runner(self.out, budget_s, say=self.said.append, **options)

    def test_a_step_that_is_done_is_not_repeated(self):
        step = shell("count", "echo x >> ../count.txt; echo hello; echo '{}' > result.json")
        self.assertEqual(self.runner().run(step), "ok")
        self.assertEqual(self.runner().run(step), "ok")
        self.assertEqual((self.out / "count.txt").read_text(), "x\n")
        self.assertEqual((self.out / "count/log.txt").read_text(), "hello\n")
        self.assertTrue((self.out / "count/result.json").exists())
        self.assertIn("count: done already", self.said)

    def test_a_step_that_failed_is_tried_again(self):
        step = shell("flaky", "echo x >> ../tries.txt; touch left-over.$(wc -l < ../tries.txt); [[ $(wc -l < ../tries.txt) -ge 2 ]]")
        self.assertEqual(self.runner().run(step), "failed")
        self.assertIn("exit code 1", self.runner().record(step)["detail"])
        self.assertEqual(self.runner().run(step), "ok")
        self.assertFalse((self.out / "flaky/left-over.1").exists(), "results of the failed try are gone")
        self.assertTrue((self.out / "flaky/left-over.2").exists())

    def test_a_step_that_hangs_is_ended_with_what_it_started_and_the_next_goes_on(self):
        hangs = shell("hangs", "sleep 600 & echo $! > child; echo $$ > own; wait", limit_s=1)
        runner = self.runner()
        # Its limit starts once it is up, so that a slow machine does not end it before it has written its numbers.
        self.assertEqual(runner.run(hangs), "timed out")
        record = runner.record(hangs)
        self.assertEqual(record["status"], "timed out")
        self.assertIn("limit of 1 s", record["detail"])
        for name in ("child", "own"):
            path = self.out / "hangs" / name
            if path.exists() and path.read_text().strip():
                self.wait_until_gone(int(path.read_text()))
        self.assertEqual(runner.run(shell("next", "true")), "ok")

    def test_children_that_outlive_a_step_are_ended(self):
        self.assertEqual(self.runner().run(shell("leaves", "sleep 600 & echo $! > child")), "ok")
        self.wait_until_gone(int((self.out / "leaves/child").read_text()))

    def wait_until_gone(self, pid):
        for _ in range(3000):
            if not is_alive(pid):
                return
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        self.fail(f"process {pid} is still there")

    def test_a_program_that_is_not_there_fails(self):
        step = bench.Step("missing", ["/no/such/program"], 10)
        self.assertEqual(self.runner().run(step), "failed")
        self.assertIn("cannot start /no/such/program", self.runner().record(step)["detail"])

    def test_a_program_that_finds_no_device_has_not_succeeded(self):
        step = shell("blind", "echo 'skipped: no CUDA device'")
        self.assertEqual(self.runner().run(step), "failed")
        self.assertEqual(self.runner().record(step)["detail"], "the program found no CUDA device")

    def test_processes_are_told_who_they_are(self):
        step = shell(
            "ranks",
            "echo $FLASHOVERLAP_RANK of $FLASHOVERLAP_WORLD_SIZE local $FLASHOVERLAP_LOCAL_RANK; "
            "echo $FLASHOVERLAP_RENDEZVOUS > where.$FLASHOVERLAP_RANK",
            processes=3,
        )
        self.assertEqual(self.runner().run(step), "ok")
        for rank in range(3):
            self.assertEqual((self.out / f"ranks/log.{rank}.txt").read_text(), f"{rank} of 3 local {rank}\n")
        places = {(self.out / f"ranks/where.{rank}").read_text() for rank in range(3)}
        self.assertEqual(len(places), 1)
        self.assertRegex(places.pop(), r"^127\.0\.0\.1:\d+\n$")

    def test_one_process_that_fails_is_named(self):
        step = shell("ranks", "[[ $FLASHOVERLAP_RANK -ne 1 ]] || exit 7", processes=3)
        self.assertEqual(self.runner().run(step), "failed")
        self.assertEqual(self.runner().record(step)["detail"], "rank 1: exit code 7")

    def test_the_others_of_a_failed_process_are_ended(self):
        step = shell("ranks", "[[ $FLASHOVERLAP_RANK -ne 1 ]] && exec sleep 600; exit 7", 600, processes=2)
        runner = self.runner(grace_s=0.1)
        self.assertEqual(runner.run(step), "failed")
        self.assertEqual(runner.record(step)["detail"], "rank 0: exit code -9; rank 1: exit code 7")

    def test_no_step_begins_without_time(self):
        clock = FakeClock()
        runner = self.runner(budget_s=100, clock=clock)
        clock.now = 98
        step = shell("late", "true")
        self.assertEqual(runner.run(step), "not run")
        self.assertIsNone(runner.record(step))
        self.assertEqual(self.runner().run(step), "ok")

    def test_no_step_may_take_longer_than_what_is_left(self):
        clock = FakeClock()
        runner = self.runner(budget_s=100, clock=clock)
        clock.now = 90
        step = shell("last", "true", limit_s=60)
        self.assertEqual(runner.run(step), "ok")
        self.assertEqual(runner.record(step)["limit_s"], 10)
        self.assertLess(bench.parse_arguments([]).budget_s, 9 * 60)

    def test_a_record_that_was_cut_off_counts_as_none(self):
        step = shell("cut", "true")
        (self.out / "cut").mkdir(parents=True)
        (self.out / "cut/step.json").write_text('{"status": "o')
        self.assertFalse(self.runner().is_done(step))
        self.assertEqual(self.runner().run(step), "ok")
        self.assertTrue(self.runner().is_done(step))


def case(op="ag", ranks=2, m=4096, n=8192, k=2048, serial=200.0, overlapped=125.0, cublas=120.0, communication=80.0, **more):
    values = dict(
        op=op, ranks=ranks, m=m, n=n, k=k, serial_us=serial, overlapped_us=overlapped, cublas_us=cublas,
        communication_us=communication, default_us=130.0, method="messages", predicted_us=130.0, wrong=0,
    )
    return {**values, **more}


class ResultsTest(unittest.TestCase):
    def test_figures(self):
        figures = results.case_figures(case())
        self.assertAlmostEqual(figures["bound_us"], 120)
        self.assertAlmostEqual(figures["speedup"], 1.6)
        self.assertAlmostEqual(figures["share"], 1.6 / (200 / 120))
        self.assertAlmostEqual(figures["prediction_error"], 5 / 125)
        self.assertNotIn("prediction_error", results.case_figures(case(method="serial", predicted_us=0)))

    def test_table_has_one_row_a_case_in_order(self):
        text = results.render_table([case(ranks=4), case(op="ar"), case(m=1024, serial=150)])
        rows = text.splitlines()
        self.assertEqual(len(rows), 2 + 3)
        self.assertEqual(len({row.count("|") for row in rows}), 1, "every row has as many columns")
        self.assertIn("| 2 | GEMM + all-reduce | 4096x8192x2048 ", rows[2])
        self.assertIn("| 2 | all-gather + GEMM | 1024x8192x2048 ", rows[3])
        self.assertIn("| 4 | all-gather + GEMM |", rows[4])
        self.assertIn("| 120 | 80 | 200 | 125 | 1.600 | 120 | 0.96 | messages | 130 | 4.0 | 130 | 0 |", rows[4])

    def test_targets_are_met_missed_or_not_measured(self):
        rows = {row[0]: row for row in results.judge([case(), case(op="rs", overlapped=210, k=3584)])}
        self.assertEqual(rows["all-gather + GEMM, m >= 4096: speed-up, median"][3], "met")
        self.assertEqual(rows["GEMM + reduce-scatter, all: speed-up, median"][3], "missed")
        self.assertEqual(rows["GEMM + all-reduce, k per rank 1024: speed-up, median"][3], "not measured")
        self.assertEqual(rows["any case: speed-up, worst"][3], "missed")
        self.assertIn("0.952 of 2", rows["any case: speed-up, worst"][2])
        self.assertEqual(rows["MoE layer: speed-up"][3], "not on GPUs yet")
        self.assertEqual({row[3] for row in results.judge([])}, {"not measured", "not on GPUs yet"})

    def test_shapes_are_those_of_the_issue(self):
        shapes = bench.shapes(4)
        self.assertEqual(len(shapes), len(set(shapes)))
        wanted = {(m, 8192, k) for m in (1024, 2048, 4096, 8192, 16384) for k in (1024, 2048, 3584)}
        self.assertEqual(set(shapes), wanted | {(4096, 12288, 12288)})

    def profile(self, world, device="GPU", units=132):
        curve = {"collective": "send", "world_size": world, "units": 16, "points": [{"bytes": 1, "time_us": world}]}
        return {
            "schema": "flashoverlap.machine-profile/1", "name": "m", "units": units, "gemm": {"launch_us": 1},
            "provenance": {"kind": "measured", "device": device, "sources": [f"of {world}"]}, "curves": [curve],
        }

    def test_profiles_of_one_machine_are_merged(self):
        merged = results.merge_profiles([self.profile(8), self.profile(2), self.profile(2)])
        self.assertEqual([curve["world_size"] for curve in merged["curves"]], [8, 2])
        self.assertEqual(merged["provenance"]["sources"], ["of 8", "of 2"])
        self.assertIsNone(results.merge_profiles([]))
        with self.assertRaisesRegex(ValueError, "profiles of GPU and other cannot be merged"):
            results.merge_profiles([self.profile(8), self.profile(2, device="other")])
        with self.assertRaisesRegex(ValueError, "differ in units: 132 and 78"):
            results.merge_profiles([self.profile(8), self.profile(2, units=78)])

    def test_json_lines_leave_out_what_was_cut_off(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lines"
            path.write_text('{"a":1}\n{"a":2}\n{"a":')
            self.assertEqual(results.json_lines(path), [{"a": 1}, {"a": 2}])
            self.assertEqual(results.json_lines(Path(folder) / "none"), [])


class WholeTest(unittest.TestCase):
    """A run from end to end on stand-ins for the programs, one of which fails at first."""

    PROGRAM = r"""#!/bin/bash
part= op= ranks= name= words=
while (($# > 0)); do
  case $1 in
    table | curves | topology) part=$1 ;;
    --ops) op=$2 ;;
    --ranks) ranks=$2 ;;
    --json) name=$2 ;;
  esac
  words+=" '$1'"
  shift
done
if [[ $part == table && $ranks == 4 && ! -e ../again ]]; then
  touch ../again
  echo cannot
  exit 3
fi
if [[ $part == table ]]; then
  for one in ${op//,/ }; do sed "s/OP/$one/; s/\"RANKS\"/$ranks/" FOLDER/case.json; done > "$name"
fi
if [[ $part == curves ]]; then cp FOLDER/profile.json "$name"; fi
echo "ran$words"
"""

    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)
        self.folder = Path(self._folder.name)
        (self.folder / "profile.json").write_text(json.dumps(ResultsTest().profile(2)))
        (self.folder / "case.json").write_text(json.dumps(case(op="OP", ranks="RANKS")) + "\n")
        text = self.PROGRAM.replace("FOLDER", str(self.folder))
        for name in bench.PROGRAMS:
            path = self.folder / "build" / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
            path.chmod(0o755)
        self.addCleanup(setattr, bench, "count_gpus", bench.count_gpus)
        self.gpus = 4
        bench.count_gpus = lambda: self.gpus

    def run_it(self, *words):
        self._stdout, sys.stdout = sys.stdout, open(os.devnull, "w")
        self._stderr, sys.stderr = sys.stderr, open(os.devnull, "w")
        try:
            return bench.main(["--build", str(self.folder / "build"), "--out", str(self.folder / "out"), *words])
        finally:
            for name, old in (("stdout", self._stdout), ("stderr", self._stderr)):
                getattr(sys, name).close()
                setattr(sys, name, old)

    def test_two_calls_complete_what_one_could_not(self):
        self.assertEqual(self.run_it(), 1)
        summary = json.loads((self.folder / "out/summary.json").read_text())
        status = {step["step"]: step["status"] for step in summary["steps"]}
        self.assertEqual([name for name, value in status.items() if value != "ok"], ["table-4"])
        self.assertEqual(len(summary["cases"]), 3)
        self.assertIn("tests-processes-4", status)
        self.assertEqual(self.run_it(), 0)
        summary = json.loads((self.folder / "out/summary.json").read_text())
        self.assertEqual(len(summary["cases"]), 6)
        self.assertAlmostEqual(summary["cases"][0]["speedup"], 1.6)
        self.assertEqual({step["status"] for step in summary["steps"]}, {"ok"})
        text = (self.folder / "out/summary.md").read_text()
        self.assertIn("| 4 | GEMM + reduce-scatter |", text)
        self.assertIn("| all-gather + GEMM, m >= 4096: speed-up, median | >= 1.30 | 1.600 of 2 | met |", text)
        self.assertEqual(json.loads((self.folder / "out/profile.json").read_text())["name"], "m")

    def test_a_rehearsal_takes_one_gpu(self):
        self.gpus = 1
        self.run_it("--rehearse", "2")
        self.assertEqual(self.run_it("--rehearse", "2"), 0)
        summary = json.loads((self.folder / "out/summary.json").read_text())
        self.assertTrue(summary["rehearsal"])
        log = (self.folder / "out/table-2/log.txt").read_text()
        self.assertIn("'--rehearse'", log)
        self.assertFalse(any("processes" in step["step"] for step in summary["steps"]))

    def test_what_is_packed_runs_elsewhere(self):
        for name in bench.PROGRAMS:  # any program will do, and has libraries
            Path(self.folder / "build" / name).write_bytes(Path("/bin/bash").read_bytes())
        self.assertEqual(self.run_it("--pack", str(self.folder / "packed")), 0)
        packed = self.folder / "packed" / bench.PROGRAMS[0]
        self.assertEqual(bench.subprocess.run([packed, "-c", "exit 3"]).returncode, 3)
        names = {path.name for path in (self.folder / "packed").iterdir() if path.is_file()}
        self.assertFalse([name for name in names if name.startswith(("libc.", "ld-"))])
        self.assertTrue(any(name.startswith("libtinfo") for name in names), names)

    def test_what_cannot_run_says_why(self):
        self.gpus = 0
        self.assertEqual(self.run_it(), 0)
        self.assertFalse((self.folder / "out").exists())
        self.gpus = 1
        with self.assertRaisesRegex(SystemExit, "1 GPU here; it takes at least 2, or --rehearse 2"):
            self.run_it()
        self.gpus = 4
        with self.assertRaisesRegex(SystemExit, "--ranks 8: this machine has 4 GPUs"):
            self.run_it("--ranks", "8")
        (self.folder / "build/bench/gpu/cluster_bench").unlink()
        with self.assertRaisesRegex(SystemExit, "has no bench/gpu/cluster_bench: build it where nvcc is"):
            self.run_it()


if __name__ == "__main__":
    unittest.main()
