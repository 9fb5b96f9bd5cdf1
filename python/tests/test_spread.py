"""Matrices that are spread over the ranks: all-gather + GEMM, a sharded weight with its gradient, and heads."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import d1_a, d1_b, d1_sum, poisoned
from hypothesis import given
from hypothesis import strategies as st

import flashoverlap as fo

sizes = st.integers(0, 70) | st.sampled_from([1, 127, 128, 129, 257])
tiles = st.none() | st.tuples(st.integers(1, 80), st.integers(1, 80)) | st.just((16, 8, 3))
counts = st.lists(st.integers(0, 70), min_size=1, max_size=4)


def begins(counts: list[int]) -> list[int]:
    return [sum(counts[:rank]) for rank in range(len(counts) + 1)]


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int64) @ b.astype(np.int64).T


@given(
    rows=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    n=sizes,
    k=st.integers(0, 40),
    tile=tiles,
    transposed=st.booleans(),
)
def test_all_gather_gemm_multiplies_the_slices_of_all_ranks(rows, n, k, tile, transposed):
    ranks, m = len(rows), sum(rows)
    whole = np.concatenate([d1_a(rank, count, k) for rank, count in enumerate(rows)])

    def on_rank(comm):
        a, b = d1_a(comm.rank, rows[comm.rank], k), d1_b(comm.rank, n, k)
        if transposed:
            a, b = np.asfortranarray(a), np.asfortranarray(b)
        gathered, out = poisoned((m, k)), poisoned((m, n))
        bias = np.arange(n, dtype=np.float32)
        fo.all_gather_gemm(a, b, comm=comm, tile=tile, gathered=gathered, out=out, bias=bias)
        np.testing.assert_array_equal(gathered, whole)
        expected = whole.astype(int) @ d1_b(comm.rank, n, k).astype(int).T + np.arange(n)
        np.testing.assert_array_equal(out, expected)
        serial = fo.all_gather_gemm(a, b, comm=comm, tile=tile, bias=bias, method="serial")
        np.testing.assert_array_equal(serial, out)
        operator = fo.AllGatherGemm(comm, m=m, n=n, k=k, rows=rows, tile=tile)
        np.testing.assert_array_equal(operator(a, b, bias=bias), out)

    fo.run_ranks(ranks, on_rank, poison_workspace=True)


def test_b05_all_gather_with_all_defaults():
    corners = {0: (-30, -27, -22), 1: (1, None, 2)}

    def on_rank(comm):
        out = fo.all_gather_gemm(d1_a(comm.rank, 64, 48), d1_b(comm.rank, 96, 48), comm=comm)
        first, second, last = corners[comm.rank]
        assert (out[0, 0], out[127, 95]) == (first, last)
        assert second is None or out[64, 0] == second

    fo.run_ranks(2, on_rank)


def test_all_gather_says_what_does_not_fit_on_every_rank():
    def on_rank(comm):
        a, b = d1_a(comm.rank, 4, 8), d1_b(comm.rank, 6, 8)
        wrong = {
            r"gathered has shape \[8, 7\]; expected \[m, k\] = \[8, 8\]": {"gathered": poisoned((8, 7))},
            r"gathered \[8, 8\] f32 has gaps": {"gathered": poisoned((8, 16))[:, :8]},
            r"out has shape \[4, 6\]": {"out": poisoned((4, 6))},
            "method is 'tail-free'": {"method": "tail-free"},
        }
        for message, arguments in wrong.items():
            with pytest.raises(fo.Error, match=message):
                fo.all_gather_gemm(a, b, comm=comm, **(arguments if comm.rank == 1 else {}))
        with pytest.raises(ValueError, match=r"ranks disagree: rank 0 calls all-gather-gemm n=6 .*rank 1 calls .* n=5"):
            fo.all_gather_gemm(a, b[: 6 - comm.rank], comm=comm)
        return fo.all_gather_gemm(a, b, comm=comm).shape

    assert fo.run_ranks(2, on_rank) == [(8, 6), (8, 6)]


@given(
    rows=counts,
    m=sizes,
    k=st.integers(0, 40),
    tile=tiles,
    parts=st.integers(0, 3),
    transposed=st.booleans(),
)
def test_sharded_weight_is_gathered_while_it_is_used(rows, m, k, tile, parts, transposed):
    ranks, n = len(rows), sum(rows)
    weight = np.concatenate([d1_b(rank, count, k) for rank, count in enumerate(rows)])
    bias = np.arange(n, dtype=np.float32)

    def on_rank(comm):
        a, b = d1_a(comm.rank, m, k), d1_b(comm.rank, rows[comm.rank], k)
        if transposed:
            a, b = np.asfortranarray(a), np.asfortranarray(b)
        gathered, out = poisoned((n, k)), poisoned((m, n))
        assert fo.sharded_weight_gemm(a, b, comm=comm, tile=tile, gathered=gathered, out=out, bias=bias) is out
        np.testing.assert_array_equal(gathered, weight)
        np.testing.assert_array_equal(out, exact(d1_a(comm.rank, m, k), weight) + bias.astype(np.int64))
        serial = fo.sharded_weight_gemm(a, b, comm=comm, tile=tile, bias=bias, method="serial")
        np.testing.assert_array_equal(serial, out)
        operator = fo.ShardedWeightGemm(comm, m=m, n=n, k=k, rows=rows, tile=tile, parts=parts)
        assert (operator.output_rows, operator.output_columns) == (m, n)
        np.testing.assert_array_equal(operator(a, b, bias=bias), out)

    fo.run_ranks(ranks, on_rank, poison_workspace=True)


@given(rows=counts, even=st.booleans(), n=sizes, samples=st.integers(0, 40), tile=tiles, parts=st.integers(0, 3))
def test_gradient_of_a_sharded_weight_is_summed_over_the_ranks(rows, even, n, samples, tile, parts):
    ranks, m = len(rows), sum(rows)
    whole = d1_sum(ranks, m, n, samples)
    cuts = [rank * m // ranks for rank in range(ranks + 1)] if even else begins(rows)
    given_rows = None if even else rows

    def on_rank(comm):
        mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
        # As they come: the gradient [samples, output features] and x [samples, input features], transposed.
        a, b = d1_a(comm.rank, m, samples).T.copy().T, d1_b(comm.rank, n, samples).T.copy().T
        out = poisoned((mine.stop - mine.start, n))
        assert fo.gradient_reduce_scatter(a, b, comm=comm, rows=given_rows, tile=tile, out=out) is out
        np.testing.assert_array_equal(out, whole[mine])
        serial = fo.gradient_reduce_scatter(a, b, comm=comm, rows=given_rows, tile=tile, method="serial")
        np.testing.assert_array_equal(serial, out)
        operator = fo.GradientReduceScatter(comm, m=m, n=n, k=samples, rows=given_rows, tile=tile, parts=parts)
        np.testing.assert_array_equal(operator(a, b), out)

    fo.run_ranks(ranks, on_rank, poison_workspace=True)


@given(
    tokens=counts,
    data=st.data(),
    k=st.integers(0, 40),
    tile=tiles,
    even=st.booleans(),
    channels=st.integers(0, 3),
    num_slices=st.integers(1, 4),
)
def test_heads_go_to_their_ranks(tokens, data, k, tile, even, channels, num_slices):
    ranks, m = len(tokens), sum(tokens)
    columns = data.draw(st.lists(st.integers(0, 70), min_size=ranks, max_size=ranks))
    n = sum(columns)
    if even:
        columns = [(rank + 1) * n // ranks - rank * n // ranks for rank in range(ranks)]
    weight = d1_b(0, n, k)
    tokens_of_all = np.concatenate([d1_a(rank, count, k) for rank, count in enumerate(tokens)])
    whole = exact(tokens_of_all, weight)

    def on_rank(comm):
        mine = slice(begins(columns)[comm.rank], begins(columns)[comm.rank + 1])
        bias = np.arange(columns[comm.rank], dtype=np.float32)
        residual = d1_a(9, m, columns[comm.rank])
        expected = np.maximum(whole[:, mine] + bias.astype(np.int64), 0) + residual.astype(np.int64)
        a = d1_a(comm.rank, tokens[comm.rank], k)
        options = {"bias": bias, "activation": "relu", "residual": residual}
        call = {"comm": comm, "columns": None if even else columns, "tile": tile, **options}
        out = poisoned((m, columns[comm.rank]))
        assert fo.gemm_all_to_all_heads(a, weight, out=out, **call) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(fo.gemm_all_to_all_heads(a, weight, method="serial", **call), out)
        made = {"rows": tokens, "columns": columns, "send_channels": channels, "num_slices": num_slices}
        operator = fo.GemmAllToAllHeads(comm, m=m, n=n, k=k, tile=tile, **made)
        assert operator.rows_from == tokens
        assert (operator.output_rows, operator.output_columns) == (m, columns[comm.rank])
        np.testing.assert_array_equal(operator(a, weight, **options), out)
        order = operator.sliced_rows()
        assert sorted(order) == list(range(m))
        options["residual"] = residual[order]
        np.testing.assert_array_equal(operator(a, weight, method="sliced", **options), out[order])

    fo.run_ranks(ranks, on_rank, poison_workspace=True)


@given(
    columns=counts,
    data=st.data(),
    n=sizes,
    tile=tiles,
    even=st.booleans(),
    parts=st.integers(0, 3),
    num_slices=st.integers(1, 4),
)
def test_rows_come_back_from_their_heads(columns, data, n, tile, even, parts, num_slices):
    ranks, k = len(columns), sum(columns)
    tokens = data.draw(st.lists(st.integers(0, 70), min_size=ranks, max_size=ranks))
    m = sum(tokens)
    if even:
        columns, tokens = ([(r + 1) * total // ranks - r * total // ranks for r in range(ranks)] for total in (k, m))
    weight, bias = d1_b(0, n, k), np.arange(n, dtype=np.float32)
    heads = [d1_a(rank, m, count) for rank, count in enumerate(columns)]
    whole = exact(np.concatenate(heads, axis=1), weight)

    def on_rank(comm):
        mine = slice(begins(tokens)[comm.rank], begins(tokens)[comm.rank + 1])
        slices = {} if even else {"rows": tokens, "columns": columns}
        out = poisoned((tokens[comm.rank], n))
        a = heads[comm.rank]
        assert fo.all_to_all_gemm(a, weight, comm=comm, tile=tile, out=out, bias=bias, **slices) is out
        np.testing.assert_array_equal(out, whole[mine] + bias.astype(np.int64))
        serial = fo.all_to_all_gemm(a, weight, comm=comm, tile=tile, bias=bias, method="serial", **slices)
        np.testing.assert_array_equal(serial, out)
        operator = fo.AllToAllGemm(comm, m=m, n=n, k=k, tile=tile, parts=parts, num_slices=num_slices, **slices)
        assert (operator.output_rows, operator.output_columns) == (tokens[comm.rank], n)
        np.testing.assert_array_equal(operator(a, weight, bias=bias), out)
        cuts = [i * a.shape[1] // num_slices for i in range(1, num_slices)]
        pieces = np.concatenate([piece.ravel() for piece in np.split(a, cuts, axis=1)]).reshape(a.shape)
        np.testing.assert_array_equal(operator(pieces, weight, bias=bias, method="sliced"), out)

    fo.run_ranks(ranks, on_rank, poison_workspace=True)


@given(rows=counts, other=sizes, k=st.integers(1, 40), tile=tiles, num_slices=st.integers(1, 5))
def test_the_sliced_baseline_gathers_piece_after_piece(rows, other, k, tile, num_slices):
    """What it gathers lies in the order of arrival, and so do the rows (weight: columns) of the output."""
    ranks, spread = len(rows), sum(rows)
    slices = [d1_a(rank, count, k) for rank, count in enumerate(rows)]
    whole = np.concatenate(slices)
    made = {"k": k, "rows": rows, "tile": tile, "num_slices": num_slices}

    def on_rank(comm):
        mine, factor = slices[comm.rank], d1_b(comm.rank, other, k)
        gather = fo.AllGatherGemm(comm, m=spread, n=other, **made)
        order = gather.sliced_rows()
        assert sorted(order) == list(range(spread))
        gathered, bias, residual = poisoned((spread, k)), np.arange(other, dtype=np.float32), d1_a(9, spread, other)
        out = gather(mine, factor, method="sliced", gathered=gathered, bias=bias, residual=residual[order])
        np.testing.assert_array_equal(gathered, whole[order])
        expected = exact(whole, factor) + bias.astype(np.int64) + residual.astype(np.int64)
        np.testing.assert_array_equal(out, expected[order])
        np.testing.assert_array_equal(gather(mine, factor, bias=bias, residual=residual), expected)

        weight = fo.ShardedWeightGemm(comm, m=other, n=spread, **made)
        order, bias = weight.sliced_rows(), np.arange(spread, dtype=np.float32)
        gathered = poisoned((spread, k))
        out = weight(factor, mine, method="sliced", gathered=gathered, bias=bias[order])
        np.testing.assert_array_equal(gathered, whole[order])
        np.testing.assert_array_equal(out, (exact(factor, whole) + bias.astype(np.int64))[:, order])
        if num_slices > 1 and sum(map(bool, rows)) > 1 and k:
            assert len(weight.plan("sliced").to_dict()["transfers"]) == num_slices * (ranks > 1)

    fo.run_ranks(ranks, on_rank, poison_workspace=True)


@given(ranks=st.integers(1, 4), m=sizes, n=sizes, k=st.integers(0, 40), tile=tiles, num_slices=st.integers(1, 5))
def test_the_sliced_baseline_scatters_group_after_group(ranks, m, n, k, tile, num_slices):
    whole = d1_sum(ranks, m, n, k)

    def on_rank(comm):
        mine = slice(comm.rank * m // ranks, (comm.rank + 1) * m // ranks)
        a, b = d1_a(comm.rank, m, k), d1_b(comm.rank, n, k)
        shape = {"m": m, "n": n, "k": k, "tile": tile, "num_slices": num_slices}
        for operator in (
            fo.GradientReduceScatter(comm, **shape),
            fo.GemmReduceScatter(comm, **shape),
            fo.GemmReduceScatter(comm, method="signal", **shape),
        ):
            out = poisoned((mine.stop - mine.start, n))
            assert operator(a, b, method="sliced", out=out) is out
            np.testing.assert_array_equal(out, whole[mine])
            assert len(operator.plan("sliced").to_dict()["groups"]) <= num_slices
            np.testing.assert_array_equal(operator(a, b), out)

    fo.run_ranks(ranks, on_rank, poison_workspace=True)


def test_there_is_a_sliced_baseline_only_where_it_was_asked_for():
    def on_rank(comm):
        gather = fo.AllGatherGemm(comm, m=8, n=6, k=8)
        for call in (lambda: gather(A, B, method="sliced"), lambda: gather.plan("sliced"), gather.sliced_rows):
            with pytest.raises(ValueError, match=r"was made without a sliced baseline; expected num_slices >= 1"):
                call()
        for make in (fo.AllGatherGemm, fo.ShardedWeightGemm, fo.GradientReduceScatter, fo.GemmReduceScatter):
            with pytest.raises(ValueError, match="num_slices is -1; expected an integer >= 0"):
                make(comm, m=8, n=6, k=8, num_slices=-1)
            with pytest.raises(ValueError, match="num_slices is 100000; it must be at most 65536"):
                make(comm, m=8, n=6, k=8, num_slices=100000)
        with pytest.raises(ValueError, match="num_slices is 2, which needs rows='contiguous'; expected 0"):
            fo.GemmReduceScatter(comm, m=8, n=6, k=8, rows="block-cyclic", num_slices=2)
        with pytest.raises(ValueError, match=r"rank 0 has .* baseline of 2 slices.*, rank 1 .* baseline of 3 slices"):
            fo.ShardedWeightGemm(comm, m=4, n=8, k=8, num_slices=2 + comm.rank)
        with pytest.raises(ValueError, match="was made without a sliced baseline; expected num_slices >= 1"):
            fo.AllToAllGemm(comm, m=4, n=6, k=8)(A[:, :4].copy(), B, method="sliced")
        with pytest.raises(ValueError, match="was made without a sliced baseline; expected num_slices >= 1"):
            fo.GemmAllToAllHeads(comm, m=8, n=6, k=8).sliced_rows()
        return gather(A, B).shape

    assert fo.run_ranks(2, on_rank) == [(8, 6), (8, 6)]


def test_there_and_back_again():
    """Tokens to heads, and heads to tokens: what attention with nothing in it gives."""

    def on_rank(comm):
        x, first, second = d1_a(comm.rank, 5, 6), d1_b(0, 8, 6), d1_b(1, 6, 8)
        heads = fo.gemm_all_to_all_heads(x, first, comm=comm)
        assert heads.shape == (10, 4)
        back = fo.all_to_all_gemm(heads, second, comm=comm, rows=[5, 5])
        np.testing.assert_array_equal(back, exact(exact(x, first), second))
        packed = fo.all_to_all_gemm(np.asfortranarray(heads), second, comm=comm)
        np.testing.assert_array_equal(packed, back)

    fo.run_ranks(2, on_rank)


def test_one_set_of_slices_after_another():
    """What the functions keep is told apart by every rank's rows."""
    calls = [[3, 5], [5, 3], [4, 4], [3, 5]]

    def on_rank(comm):
        for rows in calls:
            a, b = d1_a(comm.rank, rows[comm.rank], 6), d1_b(0, 4, 6)
            whole = np.concatenate([d1_a(rank, count, 6) for rank, count in enumerate(rows)])
            np.testing.assert_array_equal(fo.all_gather_gemm(a, b, comm=comm), exact(whole, b))
            np.testing.assert_array_equal(fo.sharded_weight_gemm(b, a, comm=comm), exact(b, whole))
            mine = slice(2 * comm.rank, 2 * comm.rank + 2)
            np.testing.assert_array_equal(fo.gemm_all_to_all_heads(a, b, comm=comm), exact(whole, b)[:, mine])

    fo.run_ranks(2, on_rank)


A, B = d1_a(0, 4, 8), d1_b(0, 6, 8)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (fo.sharded_weight_gemm, {"gathered": poisoned((8, 7))}, r"gathered has .*expected \[n, k\] = \[12, 8\]"),
        (fo.sharded_weight_gemm, {"gathered": poisoned((12, 16))[:, :8]}, r"gathered \[12, 8\] f32 has gaps"),
        (fo.sharded_weight_gemm, {"out": poisoned((4, 6))}, r"out has shape \[4, 6\]; expected .* = \[4, 12\]"),
        (fo.sharded_weight_gemm, {"bias": poisoned((6,))}, r"bias has shape \[6\]; expected \[n\] = \[12\]"),
        (fo.sharded_weight_gemm, {"a": A[:3]}, "ranks disagree: rank 0 calls sharded-weight-gemm m=4 .* m=3"),
        (fo.sharded_weight_gemm, {"method": "signal"}, "method is 'signal'; expected one of auto, overlap, serial"),
        (fo.sharded_weight_gemm, {"bais": None}, "'bais' is no argument of this call"),
        (fo.gradient_reduce_scatter, {"rows": [1]}, r"rows is \[1\]; expected a number >= 0 for each of the 2 ranks"),
        (fo.gradient_reduce_scatter, {"rows": [-1, 5]}, r"rows is \[-1, 5\]; expected a number >= 0"),
        (fo.gradient_reduce_scatter, {"rows": [1, 3]}, "ranks disagree: rank 0 calls gradient-reduce-scatter m=4"),
        (fo.gradient_reduce_scatter, {"out": poisoned((4, 6))}, r"out has shape \[4, 6\]; expected .* = \[2, 6\]"),
        (fo.gemm_all_to_all_heads, {"columns": [2]}, r"columns is \[2\]; expected a number >= 0 for each of the 2"),
        (fo.gemm_all_to_all_heads, {"columns": [2, 4]}, "ranks disagree: .*columns=2,4"),
        (fo.gemm_all_to_all_heads, {"b": B[:5]}, "ranks disagree: .* n=6 .* n=5"),
        (fo.gemm_all_to_all_heads, {"bias": poisoned((6,))}, r"bias has .*expected \[columns of this rank\]"),
        (fo.gemm_all_to_all_heads, {"out": poisoned((8, 6))}, r"out has shape \[8, 6\]; expected .* = \[8, 3\]"),
        (fo.all_to_all_gemm, {"a": A}, r"a has shape \[4, 8\]; expected \[m, columns of this rank\] = \[4, 4\]"),
        (fo.all_to_all_gemm, {"a": A[:, :4]}, r"a \[4, 4\] f32 has gaps between its rows"),
        (fo.all_to_all_gemm, {"rows": [4]}, r"rows is \[4\]; expected a number >= 0 for each of the 2 ranks"),
        (fo.all_to_all_gemm, {"rows": [3, 1]}, "ranks disagree: .*rows=3,1"),
        (fo.all_to_all_gemm, {"a": A[:3, :4].copy()}, "ranks disagree: rank 0 calls all-to-all-gemm m=4 .* m=3"),
        (fo.all_to_all_gemm, {"out": poisoned((4, 6))}, r"out has shape \[4, 6\]; expected .* = \[2, 6\]"),
        (fo.gemm_all_to_all_heads, {"stream": 1}, "stream is 1; calls on the CPU have none"),
    ],
)  # fmt: skip
def test_what_does_not_fit_on_one_rank_is_an_error_on_all(function, arguments, message):
    def on_rank(comm):
        call = {"a": A[:, :4].copy() if function is fo.all_to_all_gemm else A, "b": B, "comm": comm}
        if "bais" in arguments:  # Wrong on every rank: it is found before the ranks meet.
            with pytest.raises(TypeError, match=message):
                function(**call, **arguments)
            return function(**call).shape
        wrong = {**call, **arguments} if comm.rank == 1 else call
        with pytest.raises(fo.Error, match=message):
            function(**wrong)
        return function(**call).shape

    assert len(fo.run_ranks(2, on_rank)) == 2


def test_sizes_that_do_not_sum_up_are_an_error_on_all_ranks():
    def on_rank(comm):
        with pytest.raises(ValueError, match="sum to 5"):
            fo.ShardedWeightGemm(comm, m=4, n=6, k=8, rows=[2, 3])
        with pytest.raises(ValueError, match="sum to 7"):
            fo.GemmAllToAllHeads(comm, m=8, n=6, k=8, columns=[3, 4])
        with pytest.raises(ValueError, match="parts is -1; expected an integer >= 0"):
            fo.AllGatherGemm(comm, m=8, n=6, k=8, parts=-1)
        with pytest.raises(ValueError, match="send_channels is -1; expected an integer >= 0"):
            fo.AllToAllGemm(comm, m=8, n=6, k=8, send_channels=-1)
        operator = fo.ShardedWeightGemm(comm, m=4, n=6, k=8, rows=[2, 4])
        with pytest.raises(ValueError, match=r"b has shape \[6, 8\]; expected \[rows of this rank, k\]"):
            operator(A, B)
        with pytest.raises(ValueError, match=r"a has shape \[3, 8\]; expected \[m, k\] = \[4, 8\]"):
            operator(A[:3], B[: [2, 4][comm.rank]])

    fo.run_ranks(2, on_rank)
