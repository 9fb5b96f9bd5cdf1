#!/usr/bin/env python3
"""scripts/gpu_slices_bench.py with a stand-in for the command: links are paced to what was measured without, what is
there is not measured again, and a case that fails leaves the others."""

import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_slices_bench as bench  # noqa: E402

STAND_IN = """#!/usr/bin/env python3
import json, sys
from pathlib import Path
words = sys.argv[1:]
with open(Path(__file__).parent / "calls", "a") as calls:
    calls.write(json.dumps(words) + chr(10))
if words[1] == "{fails}":
    sys.exit("flashoverlap: no such thing")
computation = "computation_us" if words[1] == "mlp-tpsp" else "gemm_us"
print(json.dumps({{computation: 4000.0, "communication_us": 2700.0, "serial_us": 6700.0, "sliced_us": 5000.0,
                  "decomposed_us": None if "--decomposed" not in words else 4300.0, "overlap_us": 4100.0,
                  "exposed_share": 0.037, "decomposed_exposed_share": 0.111, "sliced_exposed_share": 0.37,
                  "bound_share": 0.976}}))
"""


class SlicesBench(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.program = self.folder / "flashoverlap"

    def run_it(self, cases, fails="none"):
        self.program.write_text(STAND_IN.format(fails=fails))
        self.program.chmod(0o755)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            code = bench.main(["--program", str(self.program), "--out", str(self.folder / "out"), "--cases", cases,
                               "--shape", "8192x4096x2048", "--tokens", "1024", "--hidden", "512"])
        return code, text.getvalue()

    def calls(self):
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def test_links_are_paced_to_what_the_computation_took(self):
        code, text = self.run_it("all-gather-gemm,mlp-tpsp")
        self.assertEqual(code, 0)
        free, paced, exchange_free, layer_paced = self.calls()
        self.assertIn("--link-gbps 0 ", " ".join(free))
        self.assertNotIn("--decomposed", free)
        # Three of four slices of A in 0.9 of three of four parts of 4 ms, less 4 latencies.
        gbps = 0.75 * 8192 * 2048 * 2 / (0.9 * 0.75 * 4000 - 4 * 2) / 1e3
        self.assertAlmostEqual(float(paced[paced.index("--link-gbps") + 1]), gbps, delta=0.01 * gbps)
        self.assertIn("--decomposed", paced)
        # Both GEMMs of the layer are alike, and as much is gathered as scattered.
        self.assertEqual(exchange_free[:8], ["run", "all-gather-gemm", "-m", "1024", "-n", "512", "-k", "512"])
        self.assertEqual(layer_paced[:2], ["run", "mlp-tpsp"])
        gbps = 0.75 * 1024 * 512 * 2 / (0.9 * 0.75 * 4000 - 4 * 2) / 1e3
        self.assertAlmostEqual(float(layer_paced[layer_paced.index("--link-gbps") + 1]), gbps, delta=0.01 * gbps)
        self.assertIn("| `all-gather-gemm` | 4000 | 2700 | 6700 | 5000 | 4300 | 4100 | 3.7 | 11.1 | 37.0 | 0.98 |", text)
        self.assertIn("| `mlp-tpsp` | 4000 |", (self.folder / "out" / "slices.md").read_text())

    def test_what_is_there_is_not_measured_again(self):
        self.run_it("linear-dp")
        self.run_it("linear-dp")
        self.assertEqual([call[1] for call in self.calls()], ["sharded-weight-gemm", "linear-dp"])

    def test_a_case_that_fails_leaves_the_others(self):
        code, text = self.run_it("all-to-all-gemm,attention-up", fails="all-to-all-gemm")
        self.assertEqual(code, 1)
        self.assertIn("all-to-all-gemm-8192x4096x2048-free: exit code 1", text)
        self.assertIn("no such thing", text)
        self.assertIn("| `attention-up` |", text)

    def test_every_case_has_a_size_on_the_wire(self):
        for case in bench.LAYERS:
            self.assertIn(bench.hardest_exchange(case, 4, 64, 256)[0], bench.OPERATORS)
        for operator in bench.OPERATORS:
            self.assertGreater(bench.wire_elements(operator, 4, (512, 256, 128)), 0, operator)

    def test_unknown_cases_are_refused(self):
        with self.assertRaisesRegex(SystemExit, "'gemm' is none of all-gather-gemm"):
            self.run_it("gemm")


if __name__ == "__main__":
    unittest.main()
