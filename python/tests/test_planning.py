"""Plans, predictions, tuning and simulations as plain objects; pictures of them."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from conftest import d1_a, d1_b, d1_sum

import flashoverlap as fo

A800 = {"m": 8192, "n": 8192, "k": 2048, "dtype": "float16", "world_size": 8, "machine": "8x-a800-nvlink"}


def test_plans_are_those_that_the_operators_carry_out():
    problem = {"m": 300, "n": 130, "k": 64, "tile": (64, 64), "partition": [3, 5, 7]}
    plans = fo.plan("gemm_all_reduce", world_size=2, units=1, **problem)

    def on_rank(comm):
        return fo.GemmAllReduce(comm, **problem).plan()

    assert fo.run_ranks(2, on_rank, num_threads=1) == plans
    assert fo.verify(plans) == ""
    assert "0" in fo.verify(plans[::-1])
    plan = plans[1]
    assert (plan.operation, plan.rank, plan.world_size, plan.num_tiles) == ("gemm-all-reduce", 1, 2, 15)
    assert (plan.partition, plan.num_waves) == ([3, 5, 7], 15)
    assert "partition  3,5,7" in str(plan)
    assert repr(plan) == "<flashoverlap.Plan gemm-all-reduce, rank 1 of 2, 15 tiles, 3 groups>"


def test_plan_to_dict_and_back():
    plan = fo.plan("gemm_reduce_scatter", m=100, n=64, k=8, world_size=3, rows="block-cyclic")[2]
    fields = json.loads(json.dumps(plan.to_dict()))
    assert fo.Plan.from_dict(fields) == plan
    fields["schedule"][0] = fields["schedule"][-1] + 1000
    with pytest.raises(ValueError, match="schedule"):
        fo.Plan.from_dict(fields)


def test_plan_of_an_all_to_all():
    routing = [[0, 1, 1], [1, 0]]
    plans = fo.plan("gemm_all_to_all", n=8, k=4, destinations=routing)
    assert [plan.to_dict()["output_rows"] for plan in plans] == [2, 3]


SLICES = {
    "all_gather_gemm": (fo.AllGatherGemm, {"rows": [40, 0, 60]}),
    "sharded_weight_gemm": (fo.ShardedWeightGemm, {"rows": [10, 50, 10], "parts": 2}),
    "gradient_reduce_scatter": (fo.GradientReduceScatter, {"rows": [30, 30, 40], "send_channels": 1}),
    "gemm_all_to_all_heads": (fo.GemmAllToAllHeads, {"rows": [100, 0, 0], "columns": [20, 30, 20]}),
    "all_to_all_gemm": (fo.AllToAllGemm, {"columns": [8, 8, 16], "parts": 2}),
    "gemm_reduce_scatter": (fo.GemmReduceScatter, {"method": "tail-free"}),
}


@pytest.mark.parametrize("operation", SLICES)
def test_plans_with_slices_are_those_that_the_operators_carry_out(operation):
    make, slices = SLICES[operation]
    problem = {"m": 100, "n": 70, "k": 32, "tile": (16, 16), **slices}
    problem["num_slices"] = 3

    def on_rank(comm):
        operator = make(comm, **problem)
        return [operator.plan(), operator.plan("serial"), operator.plan("sliced")]

    made = fo.run_ranks(3, on_rank, num_threads=2)
    methods = [problem.pop("method", "auto"), "serial", "sliced"]
    for method, plans in zip(methods, zip(*made, strict=True), strict=True):
        assert fo.plan(operation, world_size=3, units=2, method=method, **problem) == list(plans)
    assert len(made[0][0].to_dict()["transfers"]) > 1


def test_a_reduce_scatter_is_planned_as_it_is_called():
    problem = {"m": 100, "n": 70, "k": 32, "world_size": 2}
    kinds = [
        {
            transfer["kind"]
            for transfer in fo.plan("gemm_reduce_scatter", method=method, **problem)[0].to_dict()["transfers"]
        }
        for method in ("auto", "tail-free", "signal")
    ]
    assert kinds == [{"send", "receive"}, {"send", "receive"}, {"reduce-scatter"}]


@pytest.mark.parametrize("operation", SLICES)
def test_slices_are_simulated(operation):
    method = {"method": "tail-free"} if operation == "gemm_reduce_scatter" else {}
    call = {"m": 8192, "n": 8192, "k": 4096, "dtype": "float16", "world_size": 4, "machine": "4x-a100-nvlink", **method}
    simulation = fo.simulate(operation, **call, num_slices=4)
    assert simulation == fo.simulate(operation, **call, num_slices=4)
    assert simulation.choice is None
    assert simulation.total_us < simulation.serial_us
    assert simulation.sliced_us is not None
    assert f"{simulation.exposed_us:.1f} us of communication exposed" in str(simulation)
    assert "baseline in slices" in str(simulation)
    assert fo.simulate(operation, **call).sliced_us is None
    fields = json.loads(json.dumps(simulation.to_dict()))
    assert fields["exposed_us"] == max(rank["exposed_communication_us"] for rank in fields["ranks"])
    parts = fo.choose_parts(operation, **call)
    times = {candidate[:2]: candidate[2] for candidate in parts.candidates}
    assert times[0, 0] == pytest.approx(simulation.total_us)
    chosen = {"parts": parts.parts, "send_channels": parts.send_channels}
    assert min(times.values()) <= times[tuple(chosen.values())]
    assert "us simulated" in str(parts)
    assert fo.simulate(operation, **call, **chosen).total_us == times[tuple(chosen.values())]
    one = fo.choose_parts(operation, **call, send_channels=1)
    assert {channels for _, channels, _ in one.candidates} == {one.send_channels} == {1}


def test_tune_and_predict():
    tuning = fo.tune("gemm_all_reduce", **A800)
    assert tuning.best.total_us < tuning.serial.total_us
    assert tuning.speedup == pytest.approx(tuning.serial.total_us / tuning.best.total_us)
    assert "Chosen: overlap" in str(tuning)
    assert tuning.best == fo.predict("gemm_all_reduce", **A800)
    assert json.loads(json.dumps(tuning.to_dict()))["best"]["partition"] == tuning.best.partition
    waves = sum(tuning.best.partition)
    given = fo.predict("gemm_all_reduce", **A800, tile=tuning.best.tile, partition=[1] * waves)
    assert given.partition == [1] * waves
    assert given.total_us >= tuning.best.total_us
    assert f"{given.total_us:.1f} us predicted" in str(given)


def test_simulate():
    simulation = fo.simulate("gemm_all_reduce", **A800)
    again = fo.simulate("gemm_all_reduce", **A800)
    assert simulation == again
    assert simulation.total_us == pytest.approx(simulation.choice.total_us, rel=0.1)
    assert len(simulation.ranks) == 8
    assert "us simulated" in str(simulation)
    slow = fo.simulate("gemm_all_reduce", **A800, slow_ranks={3: 2.0})
    assert slow.total_us > simulation.total_us
    fields = json.loads(json.dumps(simulation.to_dict()))
    assert {span["rank"] for span in fields["spans"]} == {0, 1}


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: fo.plan("gemm", m=1, n=1, k=1), ValueError, "operation is 'gemm'; expected one of gemm-all-reduce"),
        (lambda: fo.plan("all_gather_gemm", m=8, n=1, k=1, rows=[4, 5]), ValueError, "4,5 sum to 9; expected 8"),
        (lambda: fo.plan("all_gather_gemm", m=8, n=1, k=1, rows=[8], world_size=2), ValueError, "each of the 2 ranks"),
        (lambda: fo.plan("all_gather_gemm", m=8, n=1, k=1, rows="contiguous"), ValueError, "expected a number for"),
        (lambda: fo.plan("gemm_all_reduce", m=8, n=1, k=1, rows=[8]), ValueError, "expected 'contiguous' or"),
        (lambda: fo.plan("all_gather_gemm", m=8, n=1, k=1, columns=[1]), ValueError, "columns are for gemm-all-to-all"),
        (lambda: fo.plan("all_gather_gemm", m=8, n=1, k=1, world_size=65), ValueError, "world_size is 65; .* 1 to 64"),
        (lambda: fo.plan("all_gather_gemm", m=8, n=1, k=1, partition=[1]), ValueError, "has slices in its place"),
        (lambda: fo.plan("all_gather_gemm", m=8, n=1, k=1, method="signal"), ValueError, "method is 'signal'"),
        (lambda: fo.plan("all_gather_gemm", m=8, n=1, k=1, method="sliced"), ValueError, "expected num_slices >= 1"),
        (lambda: fo.plan("gemm_all_reduce", m=8, n=1, k=1, method="sliced"), ValueError, "method is 'sliced'"),
        (lambda: fo.tune("all_gather_gemm", **A800), ValueError, "travels in slices, .* choose_parts and simulate"),
        (lambda: fo.predict("gemm_reduce_scatter", method="tail-free", **A800), ValueError, "travels in slices"),
        (lambda: fo.simulate("gemm_all_reduce", method="serial", **A800), ValueError, "'serial'; expected one of auto"),
        (lambda: fo.choose_parts("gemm_all_reduce", **A800), ValueError, "has wave groups, not slices"),
        (lambda: fo.plan("gemm_all_to_all", m=1, n=1, k=1), ValueError, "destinations: one list per rank"),
        (lambda: fo.plan("gemm_all_reduce", m=1, n=1, k=1, world_size=5000), ValueError, "world_size is 5000"),
        (lambda: fo.tune("gemm_all_reduce", m=1, n=1, k=1, machine="no-such"), ValueError, "no-such"),
        (lambda: fo.tune("gemm_all_reduce", m=1, n=1, k=1, machine="/no/such.json"), OSError, "/no/such.json"),
        (lambda: fo.tune("gemm_all_reduce", m=1, n=1, k=1, machine=3), ValueError, "machine is 3; expected"),
        (lambda: fo.simulate("gemm_all_reduce", **A800, jitter=7), ValueError, "jitter"),
        (lambda: fo.simulate("gemm_all_reduce", **A800, seed=-1), ValueError, "seed is -1"),
        (lambda: fo.MachineProfile.from_dict({"name": "x"}), OSError, "schema"),
    ],
)  # fmt: skip
def test_wrong_calls(call, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, fo.Error)


def test_machine_profiles():
    names = fo.machine_profiles()
    assert "8x-a800-nvlink" in names
    machine = fo.MachineProfile.load("8x-a800-nvlink")
    assert repr(machine) == "<flashoverlap.MachineProfile 8x-a800-nvlink>"
    assert fo.MachineProfile.from_dict(machine.to_dict()).to_dict() == machine.to_dict()
    units = machine.communication_units("gemm_all_reduce", 8)
    times = machine.transfer_us("gemm_all_reduce", 8, [0, 1 << 20, 1 << 24], units=units[0], dtype="float16")
    assert times[0] == 0 < times[1] < times[2]


def test_tuner_chooses_for_the_calls():
    def on_rank(comm, machine):
        comm.use_tuner(machine)
        operator = fo.GemmAllReduce(comm, m=256, n=128, k=16)
        np.testing.assert_array_equal(
            operator(d1_a(comm.rank, 256, 16), d1_b(comm.rank, 128, 16)), d1_sum(2, 256, 128, 16)
        )
        return operator.plan().partition

    machine = fo.MachineProfile.load("1x-h200-rehearsal-2").to_dict()
    kernel = {**machine["gemm"]["kernels"][0], "dtype": "f32", "tile_m": 32, "tile_n": 32}
    machine["gemm"] = {**machine["gemm"], "kernels": [kernel], "samples": []}
    fast, slow = dict(machine), dict(machine)
    fast["levels"] = [{"name": "link", "ranks": 0, "ports": 0, "latency_us": 1e6, "bandwidth_gbps": 1e6,
                       "latency_grows": False, "source": ""}]  # fmt: skip
    fast["curves"] = slow["curves"] = []
    slow["levels"] = [{**fast["levels"][0], "latency_us": 0, "bandwidth_gbps": 1e-3}]
    # A huge latency: one transfer. Nothing but bandwidth, and little of it: start at once.
    assert fo.run_ranks(2, lambda comm: on_rank(comm, fast), num_threads=1) == [[32], [32]]
    many = fo.run_ranks(2, lambda comm: on_rank(comm, slow), num_threads=1)
    assert many[0] == many[1]
    assert many[0][0] == 1
    assert sum(many[0]) == 32


def test_b33_a_torn_cache_is_refused_with_a_warning(tmp_path):
    cache = tmp_path / "tuning.json"
    cache.write_text('{"schema": "flash')

    def on_rank(comm):
        comm.use_tuner(cache=str(cache))
        return fo.gemm_all_reduce(d1_a(comm.rank, 16, 8), d1_b(comm.rank, 8, 8), comm=comm)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for out in fo.run_ranks(2, on_rank):
            np.testing.assert_array_equal(out, d1_sum(2, 16, 8, 8))
    assert any("tuning.json" in str(warning.message) for warning in heard)


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    plan = fo.plan("gemm_reduce_scatter", m=300, n=260, k=64, world_size=2, tile=(64, 64), units=2)[0]
    machine = fo.MachineProfile.load("8x-a800-nvlink")
    for axes, name in [
        (plan.plot(), "plan"),
        (fo.simulate("gemm_all_reduce", **A800).plot(), "timeline"),
        (machine.plot("gemm_all_reduce", 8), "bandwidth"),
    ]:
        axes.figure.savefig(tmp_path / f"{name}.png")
    tiles = plan.plot().patches
    assert len(tiles) == plan.num_tiles
    area = sum(tile.get_width() * tile.get_height() for tile in tiles)
    assert area == 300 * 260
