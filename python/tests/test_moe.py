"""The MoE layer on NumPy arrays: against a reference in float64, and the cases of the list of known faults."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashoverlap as fo


def experts_of(rank: int, ranks: int, experts: int) -> range:
    return range(rank * experts // ranks, (rank + 1) * experts // ranks)


def identity_weights(rank: int, ranks: int, experts: int, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """Without gate and activation: expert e multiplies by e + 1."""
    mine = experts_of(rank, ranks, experts)
    up = np.stack([np.eye(hidden, dtype=np.float32)] * len(mine)) if mine else np.zeros((0, hidden, hidden), np.float32)
    return up, up * np.array([e + 1 for e in mine], np.float32)[:, None, None]


def run_identity(ranks, experts, hidden, calls, **options):
    """calls: for each call and rank (x [tokens, H], ids, weights); the results likewise, of one layer."""

    def on_rank(comm):
        up, down = identity_weights(comm.rank, ranks, experts, hidden)
        layer = fo.MoeLayer(
            comm, hidden=hidden, intermediate=hidden, num_experts=experts, gated=False, activation=None, **options
        )
        results = []
        for call in calls:
            x, ids, weights = call[comm.rank]
            out = np.full_like(x, np.nan)
            results.append((layer(x, fo.routing(ids, weights, experts), up, down, out=out), dict(layer.report)))
        return results

    return fo.run_ranks(ranks, on_rank, poison_workspace=True)


def test_b17_the_same_expert_twice_in_one_token():
    x, ones = np.ones((9, 64), np.float32), np.ones((9, 6), np.float32)
    row = [121, 62, 117, 62, 32, 13]
    calls = [
        [(x, np.array([row] * 9), ones)] * 3,
        [(x, np.array([[5] * 6] * 9), ones)] * 3,
        [(x, np.array([row, [5] * 6, [0, 1, 2, 3, 4, 5]] * 3), ones)] * 3,
    ]
    for first, second, third in run_identity(3, 144, 64, calls):
        np.testing.assert_array_equal(first[0], 413)
        np.testing.assert_array_equal(second[0], 36)
        np.testing.assert_array_equal(third[0][:, 0], [413, 36, 21] * 3)


def test_b19_experts_without_tokens_after_a_call_that_dirtied_the_memory():
    ones = np.ones((16, 1), np.float32)
    t = np.arange(16)
    dirty = (np.full((16, 32), 1e4, np.float32), (t % 8)[:, None], ones)
    x = np.repeat((t + 1).astype(np.float32)[:, None], 32, axis=1)
    clean = (x, np.array([0, 1, 3, 4, 6, 7])[t % 6][:, None], ones)
    one_expert = (x, np.full((16, 1), 2), ones)
    nothing = (np.zeros((0, 32), np.float32), np.zeros((0, 1), int), np.zeros((0, 1), np.float32))
    calls = [[dirty] * 4, [clean] * 4, [one_expert] * 4, [nothing] * 4]
    for results in run_identity(4, 8, 32, calls):
        expected = [1, 4, 12, 20, 35, 48, 7, 16, 36, 50, 77, 96, 13, 28, 60, 80]
        np.testing.assert_array_equal(results[1][0], np.repeat(np.array(expected)[:, None], 32, axis=1))
        np.testing.assert_array_equal(results[2][0], 3 * x)
        assert results[3][0].shape == (0, 32)


def test_b29_more_rows_than_an_expert_takes():
    call = [(np.ones((256, 16), np.float32), np.full((256, 1), 7), np.ones((256, 1), np.float32))] * 4
    for ((out, report),) in run_identity(4, 8, 16, [call]):
        np.testing.assert_array_equal(out, 8)
        assert report["all_dropped_rows"] == 0
    results = run_identity(4, 8, 16, [call], capacity=64)
    rows = np.concatenate([out[:, 0] for ((out, _),) in results])
    assert ((rows == 8).sum(), (rows == 0).sum()) == (64, 960)
    assert {report["all_dropped_rows"] for ((_, report),) in results} == {960}


def test_options_change_how_and_not_what():
    rng = np.random.default_rng(3)
    ids, weights = rng.integers(0, 6, (50, 2)), rng.random((50, 2), np.float32)
    call = [(rng.integers(-4, 5, (50, 16)).astype(np.float32), ids, weights)] * 3
    plain = run_identity(3, 6, 16, [call])
    for options in (
        {"segment_bands": 1, "consumers": 3, "tile": (8, 8)},
        {"transport": "collective", "collective_groups": 2},
        {"order": "expert-major", "segment_bands": 7},
    ):
        for ((out, report),), ((expected, _),) in zip(run_identity(3, 6, 16, [call], **options), plain, strict=True):
            np.testing.assert_array_equal(out, expected)
            assert report["setting"]["segment_bands"] == options.get("segment_bands", 2)
            assert report["setting"]["consumers"] == options.get("consumers", 1)
            waste = report["waste"]
            assert waste["wasted_rows"] == waste["computed_rows"] - waste["valid_rows"]
            assert report["adaptation"] == ""


def test_adaptation_tells_what_it_decides_and_keeps_the_bits():
    x, ones = np.ones((64, 8), np.float32), np.ones((64, 1), np.float32)
    ids = (np.arange(64) % 4)[:, None]

    def on_rank(comm):
        up, down = identity_weights(comm.rank, 2, 4, 8)
        layer = fo.MoeLayer(
            comm, hidden=8, intermediate=8, num_experts=4, gated=False, activation=None, adapt=True,
            consumers=2, controller={"max_consumers": 2, "min_consumers": 2, "patience": 1},
        )  # fmt: skip
        outs, told = [], []
        for step in range(4):
            layer.set_adaptive(step < 3)
            outs.append(layer(x, fo.routing(ids, ones, 4), up, down))
            told.append(layer.report["adaptation"])
            assert layer.setting["consumers"] == 2
        for out in outs[1:]:
            np.testing.assert_array_equal(out, outs[0])
        return told

    first, second = fo.run_ranks(2, on_rank)
    assert first == second
    assert first[1] != ""
    assert first[2] != ""


def test_plans_and_parts_of_the_last_call():
    def on_rank(comm):
        up, down = identity_weights(comm.rank, 2, 4, 8)
        layer = fo.MoeLayer(comm, hidden=8, intermediate=8, num_experts=4, gated=False, activation=None)
        with pytest.raises(ValueError, match="call"):
            layer.plans()
        layer(np.ones((5, 8), np.float32), fo.routing([[0]] * 5, [[1.0]] * 5, 4), up, down)
        operations = [plan.operation for plan in layer.plans()]
        parts = layer.measure_parts(up, down)
        assert all(value >= 0 for value in parts.values())
        return operations, sorted(parts)

    for operations, parts in fo.run_ranks(2, on_rank):
        assert len(set(operations)) == 2
        assert parts == ["combine_gemm_us", "combine_transfer_us", "dispatch_gemm_us", "dispatch_transfer_us"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_bands": 0}, "segment_bands is 0"),
        ({"consumers": 17}, "consumers is 17"),
        ({"collective_groups": 0}, "collective_groups is 0"),
        ({"consumers": 1.5}, "consumers is 1.5; expected an integer"),
        ({"controller": {"speed": 1}}, "controller has 'speed'; expected some of .*max_consumers"),
        ({"controller": {"patience": "much"}}, r"controller\['patience'\] is 'much'; expected a number"),
        ({"adapt": True, "controller": {"max_consumers": 0}}, "max_consumers"),
        ({"padding": "soft"}, "soft"),
    ],
)
def test_layer_options_that_do_not_hold(options, message):
    def on_rank(comm):
        with pytest.raises(ValueError, match=message):
            fo.MoeLayer(comm, hidden=8, intermediate=8, num_experts=4, **options)

    fo.run_ranks(2, on_rank)


def silu(x):
    return x / (1 + np.exp(-x))


def reference(x, ids, weights, up, gate, down):
    out = np.zeros(x.shape)
    for token, (experts, factors) in enumerate(zip(ids, weights, strict=True)):
        for e, factor in zip(experts, factors, strict=True):
            if e >= 0:
                inner = up[e] @ x[token]
                inner = silu(gate[e] @ x[token]) * inner if gate is not None else silu(inner)
                out[token] += factor * (down[e] @ inner)
    return out


@given(
    ranks=st.integers(1, 4),
    experts=st.integers(1, 9),
    tokens=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    top_k=st.integers(1, 3),
    gated=st.booleans(),
    transport=st.sampled_from(["put", "collective"]),
    seed=st.integers(0, 1000),
)
def test_any_routing_against_float64(ranks, experts, tokens, top_k, gated, transport, seed):
    hidden, intermediate = 12, 10
    rng = np.random.default_rng(seed)
    up, gate = (rng.standard_normal((experts, intermediate, hidden)).astype(np.float32) for _ in range(2))
    down = rng.standard_normal((experts, hidden, intermediate)).astype(np.float32)
    x = [rng.standard_normal((count, hidden)).astype(np.float32) for count in tokens]
    ids = [rng.integers(-1, experts, (count, top_k)) for count in tokens]
    weights = [rng.random((count, top_k), np.float32) for count in tokens]

    def on_rank(comm):
        r = comm.rank
        mine = slice(r * experts // ranks, (r + 1) * experts // ranks)
        arguments = ((ids[r], weights[r]), up[mine], gate[mine] if gated else None, down[mine])
        options = {"comm": comm, "num_experts": experts, "transport": transport}
        out = fo.moe_layer(x[r], *arguments, **options)
        strided = fo.moe_layer(np.asfortranarray(x[r]), *arguments, **options, method="serial")
        np.testing.assert_array_equal(out, strided)
        return out

    for r, out in enumerate(fo.run_ranks(ranks, on_rank, poison_workspace=True)):
        expected = reference(x[r], ids[r], weights[r], up, gate if gated else None, down)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)


def test_logits_choose_the_experts():
    logits = np.array([[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, -np.inf, -np.inf]], np.float32)
    routed = fo.route(logits, 2)
    assert routed.experts == [3, 2, 0, 1, 0, 1]
    e = np.exp([3.0, 2.0]) / np.exp(np.arange(4.0)).sum()
    np.testing.assert_allclose(routed.weights, [*e, *e, 0.5, 0.5], rtol=1e-6)
    assert sum(fo.route(logits, 2, renormalise=True).weights) == pytest.approx(3)

    def on_rank(comm):
        up, down = identity_weights(comm.rank, 2, 4, 8)
        x = np.ones((3, 8), np.float32)
        return fo.moe_layer(x, logits, up, None, down, comm=comm, top_k=2, renormalise=True, activation=None)

    share = np.exp(1) / (1 + np.exp(1))
    for out in fo.run_ranks(2, on_rank):
        np.testing.assert_allclose(
            out[:, 0], [4 * share + 3 * (1 - share), 1 * share + 2 * (1 - share), 1.5], rtol=1e-6
        )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"router": (np.full((4, 1), 9), np.ones((4, 1)))}, ValueError, "9"),
        ({"router": (np.zeros((4, 1), int), np.ones((4, 2)))}, ValueError, r"ids has shape \[4, 1\] and"),
        ({"router": (np.zeros((3, 1), int), np.ones((3, 1)))}, ValueError, r"x has shape \[4, 8\]; expected"),
        ({"router": (1, 2, 3)}, ValueError, "router is a tuple of 3; expected"),
        ({"router": np.zeros((4, 4), np.float32)}, ValueError, "expected top_k with it"),
        ({"w_up": np.zeros((2, 8), np.float32)}, ValueError, r"w_up has shape \[2, 8\]; expected a stack"),
        ({"w_down": np.zeros((2, 8, 7), np.float32)}, ValueError, r"w_down has shape \[2, 8, 7\]; expected"),
        ({"w_down": np.zeros((2, 8, 8), np.float16)}, TypeError, "w_down has type float16; expected float32"),
        ({"x": np.zeros((4, 8))}, TypeError, "x has type float64"),
        ({"out": np.zeros((4, 9), np.float32)}, ValueError, r"out has shape \[4, 9\]"),
        ({"transport": "pigeon"}, ValueError, "pigeon"),
        ({"method": "fast"}, ValueError, "method is 'fast'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_on_one_rank_is_an_error_on_all(change, kind, message):
    def on_rank(comm):
        up, down = identity_weights(comm.rank, 2, 4, 8)
        arguments = {
            "x": np.ones((4, 8), np.float32), "router": (np.zeros((4, 1), int), np.ones((4, 1))),
            "w_up": up, "w_gate": None, "w_down": down, "activation": None,
        }  # fmt: skip
        wrong = {**arguments, **change} if comm.rank == 1 else arguments
        with pytest.raises(kind if comm.rank == 1 else fo.Error, match=message):
            fo.moe_layer(**wrong, comm=comm)
        np.testing.assert_array_equal(fo.moe_layer(**arguments, comm=comm), 1)

    fo.run_ranks(2, on_rank)


def test_gradients_by_finite_differences():
    ranks, experts, hidden, intermediate = 2, 3, 5, 4
    rng = np.random.default_rng(7)
    up = rng.standard_normal((experts, 2 * intermediate, hidden)).astype(np.float32)
    down = rng.standard_normal((experts, hidden, intermediate)).astype(np.float32)
    x = rng.standard_normal((ranks, 3, hidden)).astype(np.float32)
    ids = np.array([[[0, 2], [1, 1], [2, -1]], [[0, 1], [2, 0], [-1, -1]]])
    weights = rng.random((ranks, 3, 2)).astype(np.float32)
    by = rng.standard_normal((ranks, 3, hidden)).astype(np.float32)

    def on_rank(comm):
        r = comm.rank
        mine = slice(r * experts // ranks, (r + 1) * experts // ranks)
        layer = fo.MoeLayer(comm, hidden=hidden, intermediate=intermediate, num_experts=experts)
        w_up, w_down = np.ascontiguousarray(up[mine]), np.ascontiguousarray(down[mine])
        layer(x[r], fo.routing(ids[r], weights[r], experts), w_up, w_down)
        of_weights = np.full((3, 2), np.nan, np.float32)
        of_up, of_down = np.full_like(w_up, np.nan), np.full_like(w_down, np.nan)
        of_x = layer.backward(
            by[r], w_up, w_down, weights_gradient=of_weights, w_up_gradient=of_up, w_down_gradient=of_down
        )
        return of_x, of_weights, of_up, of_down

    results = fo.run_ranks(ranks, on_rank)

    def loss(x, weights, up, down):
        gate, rest = up[:, :intermediate], up[:, intermediate:]
        return sum((by[r] * reference(x[r], ids[r], weights[r], rest, gate, down)).sum() for r in range(ranks))

    arguments = [array.astype(np.float64) for array in (x, weights, up, down)]
    found = [np.stack([result[0] for result in results]), np.stack([result[1] for result in results])]
    found += [np.concatenate([result[i] for result in results]) for i in (2, 3)]
    for which, got in enumerate(found):
        for index in np.ndindex(got.shape):
            if which == 1 and ids[index] < 0:
                continue
            step = 1e-5
            moved = [[array.copy() for array in arguments] for _ in range(2)]
            moved[0][which][index] += step
            moved[1][which][index] -= step
            expected = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
            assert got[index] == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_overlapped_where_that_wins():
    """Whatever is chosen, on all ranks alike, the result has the same bits."""
    rng = np.random.default_rng(5)
    tokens, hidden, experts = 40, 24, 6
    x = rng.standard_normal((2, tokens, hidden), dtype=np.float32).astype(np.float16)
    weights = np.full((tokens, 2), 0.5, np.float32)
    ids = rng.integers(0, experts, (2, tokens, 2))
    up = rng.standard_normal((experts, 2 * hidden, hidden), dtype=np.float32).astype(np.float16)
    down = rng.standard_normal((experts, hidden, hidden), dtype=np.float32).astype(np.float16)

    def on_rank(comm):
        mine = slice(comm.rank * experts // 2, (comm.rank + 1) * experts // 2)
        made = {"hidden": hidden, "intermediate": hidden, "num_experts": experts, "dtype": "float16"}
        routed = fo.routing(ids[comm.rank], weights, experts)

        def calls(count, method="auto", **options):
            layer = fo.MoeLayer(comm, **made, **options)
            outs = [layer(x[comm.rank], routed, up[mine], down[mine], method=method) for _ in range(count)]
            gradient = layer.backward(outs[-1], up[mine], down[mine], method=method)
            return [*outs, gradient], layer.report, layer

        expected, report, _ = calls(1, method="serial")
        assert (report["method"], report["choice"]) == ("serial", "")
        for options in ({"overlap_if": "measured"}, {"overlap_if": "predicted", "machine": "4x-a100-nvlink"}):
            outs, _, layer = calls(10, **options)
            for out in outs[:-1]:
                np.testing.assert_array_equal(out, expected[0])
            np.testing.assert_array_equal(outs[-1], expected[1])
            layer(x[comm.rank], routed, up[mine], down[mine])
            chosen = layer.report
            assert chosen["method"] in ("serial", "overlap")
            assert len(set(comm.exchange(f"{chosen['method']} {chosen['choice']}".encode()))) == 1
            start = (
                "predicted, "
                if "machine" in options
                else {"serial": "serial: ", "overlap": "overlapped: "}[chosen["method"]]
            )
            assert chosen["choice"].startswith(start), chosen["choice"]
            layer(x[comm.rank], routed, up[mine], down[mine], method="serial")
            assert (layer.report["method"], layer.report["choice"]) == ("serial", "")
        machine = fo.MachineProfile.load("4x-a100-nvlink")
        out = fo.moe_layer(
            x[comm.rank], (ids[comm.rank], weights), up[mine, hidden:], up[mine, :hidden], down[mine],
            comm=comm, overlap_if="predicted", machine=machine,
        )  # fmt: skip
        np.testing.assert_array_equal(out, expected[0])

    fo.run_ranks(2, on_rank, poison_workspace=True)


def test_what_does_not_fit_of_overlap_if():
    def on_rank(comm):
        made = {"hidden": 8, "intermediate": 8, "num_experts": 4}
        with pytest.raises(ValueError, match="overlap_if 'maybe' is not accepted; expected one of always, measured"):
            fo.MoeLayer(comm, **made, overlap_if="maybe")
        with pytest.raises(ValueError, match="machine is None; overlap_if 'predicted' needs a machine profile"):
            fo.MoeLayer(comm, **made, overlap_if="predicted")
        with pytest.raises(ValueError, match="machine is given, but overlap_if is 'always'; expected 'predicted'"):
            fo.MoeLayer(comm, **made, machine="4x-a100-nvlink")
        x, weights = np.ones((2, 8), np.float32), np.ones((2, 8, 8), np.float32)
        call = {"top_k": 1, "comm": comm, "overlap_if": "measured" if comm.rank else "always"}
        with pytest.raises(ValueError, match=r"ranks disagree: .*'overlap_if': 'always'.*'overlap_if': 'measured'"):
            fo.moe_layer(x, np.ones((2, 4), np.float32), weights, None, weights, **call)

    fo.run_ranks(2, on_rank)
