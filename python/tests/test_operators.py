"""The functions and classes on NumPy arrays against 64-bit integer sums, which are exact."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from conftest import d1_a, d1_b, d1_sum, poisoned
from hypothesis import given
from hypothesis import strategies as st

import flashoverlap as fo

sizes = st.integers(0, 70) | st.sampled_from([1, 127, 128, 129, 257])
worlds = st.integers(1, 4)
tiles = st.none() | st.tuples(st.integers(1, 80), st.integers(1, 80)) | st.just((16, 8, 3))


@given(ranks=worlds, m=sizes, n=sizes, k=st.integers(0, 40), tile=tiles)
def test_all_reduce_is_the_exact_sum_on_every_rank(ranks, m, n, k, tile):
    def on_rank(comm):
        out = poisoned((m, n))
        a, b = d1_a(comm.rank, m, k), d1_b(comm.rank, n, k)
        assert fo.gemm_all_reduce(a, b, comm=comm, tile=tile, out=out) is out
        serial = fo.gemm_all_reduce(a, b, comm=comm, tile=tile, method="serial")
        np.testing.assert_array_equal(out, serial)
        return out

    for out in fo.run_ranks(ranks, on_rank, poison_workspace=True):
        np.testing.assert_array_equal(out, d1_sum(ranks, m, n, k))


@given(
    ranks=worlds,
    m=sizes,
    n=sizes,
    k=st.integers(0, 40),
    tile=tiles,
    how=st.sampled_from(
        [("contiguous", "auto"), ("contiguous", "signal"), ("contiguous", "tail-free"), ("block-cyclic", "auto")]
    ),
)
def test_reduce_scatter_gives_each_rank_its_rows(ranks, m, n, k, tile, how):
    rows, method = how

    def on_rank(comm):
        a, b = d1_a(comm.rank, m, k), d1_b(comm.rank, n, k)
        operator = fo.GemmReduceScatter(comm, m=m, n=n, k=k, rows=rows, tile=tile, method=method)
        out = poisoned((operator.output_rows, n))
        operator(a, b, out=out)
        for again in (method, "serial"):
            other = fo.gemm_reduce_scatter(a, b, comm=comm, rows=rows, tile=tile, method=again)
            np.testing.assert_array_equal(out, other)
        return operator.owned_rows(), out

    whole = d1_sum(ranks, m, n, k)
    results = fo.run_ranks(ranks, on_rank, poison_workspace=True)
    assert sorted(row for owned, _ in results for row in owned) == list(range(m))
    for rank, (owned, out) in enumerate(results):
        if rows == "contiguous":
            assert owned == list(range(rank * m // ranks, (rank + 1) * m // ranks))
        np.testing.assert_array_equal(out, whole[owned])


@given(data=st.data(), ranks=worlds, n=st.integers(0, 40), k=st.integers(0, 20))
def test_all_to_all_sends_each_row_where_it_belongs(data, ranks, n, k):
    routing = [data.draw(st.lists(st.integers(0, ranks - 1), max_size=60)) for _ in range(ranks)]

    def on_rank(comm):
        mine = routing[comm.rank]
        a, b = d1_a(comm.rank, len(mine), k), d1_b(comm.rank, n, k)
        operator = fo.GemmAllToAll(comm, mine, n=n, k=k)
        out = operator(a, b)
        np.testing.assert_array_equal(out, fo.gemm_all_to_all(a, b, np.array(mine, np.int32), comm=comm))
        assert operator.rows_from == [source.count(comm.rank) for source in routing]
        return out

    for rank, out in enumerate(fo.run_ranks(ranks, on_rank, poison_workspace=True)):
        expected = [
            (d1_a(source, len(mine), k).astype(int) @ d1_b(source, n, k).astype(int).T)[np.array(mine) == rank]
            for source, mine in enumerate(routing)
            if mine
        ]
        np.testing.assert_array_equal(out, np.concatenate([np.zeros((0, n), int), *expected]))


def test_function_follows_a_routing_that_changes_on_one_rank_only():
    routings = [[[0, 1, 1], [0, 0]], [[0, 1, 1], [1, 0]], [[0, 1, 1], [0, 0]]]

    def on_rank(comm):
        counts = []
        for routing in routings:
            mine = routing[comm.rank]
            a, b = d1_a(comm.rank, len(mine), 8), d1_b(comm.rank, 4, 8)
            counts.append(fo.gemm_all_to_all(a, b, mine, comm=comm).shape[0])
        return counts

    assert fo.run_ranks(2, on_rank) == [[3, 2, 3], [2, 3, 2]]


def reference_epilogue(total, bias, activation, residual, weight, eps):
    y = total if bias is None else total + bias.astype(np.float64)
    if activation == "relu":
        y = np.maximum(y, 0)
    elif activation == "silu":
        y = y / (1 + np.exp(-y))
    elif activation == "gelu":
        y = y * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(y / math.sqrt(2)))
    h = y if residual is None else y + residual.astype(np.float64)
    out = h
    if weight is not None:
        out = h / np.sqrt((h * h).mean(axis=1, keepdims=True) + eps) * weight.astype(np.float64)
    return h, out


@given(
    ranks=worlds,
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    activation=st.sampled_from([None, "none", "relu", "gelu", "silu"]),
    has=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    operation=st.sampled_from([fo.gemm_all_reduce, fo.gemm_reduce_scatter]),
)
def test_epilogue_is_applied_once_to_the_sum(ranks, m, n, activation, has, operation):
    k, eps = 8, 1e-3
    total = d1_sum(ranks, m, n, k).astype(np.float64) / 16
    bias = np.linspace(-2, 2, n).astype(np.float32) if has[0] else None
    residual = np.cos(np.arange(m * n)).reshape(m, n).astype(np.float32) if has[1] else None
    weight = np.linspace(0.5, 1.5, n).astype(np.float32) if has[2] else None
    h, expected = reference_epilogue(total, bias, activation, residual, weight, eps)

    def on_rank(comm):
        mine = slice(0, m)
        if operation is fo.gemm_reduce_scatter:
            mine = slice(comm.rank * m // ranks, (comm.rank + 1) * m // ranks)
        part = None if residual is None else residual[mine]
        residual_out = None if residual is None else poisoned(part.shape)
        out = operation(
            d1_a(comm.rank, m, k) / 16, d1_b(comm.rank, n, k), comm=comm, bias=bias, activation=activation,
            residual=part, residual_out=residual_out, rms_norm_weight=weight, rms_norm_eps=eps,
        )  # fmt: skip
        # float32 rounding of a few operations on numbers up to about 100.
        np.testing.assert_allclose(out, expected[mine], rtol=2e-5, atol=2e-4)
        if residual_out is not None:
            np.testing.assert_allclose(residual_out, h[mine], rtol=2e-5, atol=2e-4)

    fo.run_ranks(ranks, on_rank, poison_workspace=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_b31_bias_is_added_once_however_many_ranks(ranks):
    zeros = np.zeros((8, 4), np.float32)

    def on_rank(comm):
        for operation in (fo.gemm_all_reduce, fo.gemm_reduce_scatter):
            out = operation(zeros, zeros[:6], comm=comm, bias=np.ones(6, np.float32))
            np.testing.assert_array_equal(out, 1)

    fo.run_ranks(ranks, on_rank)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_16_bit_types(dtype, ranks):
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        numpy_dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        numpy_dtype = np.dtype(np.float16)
    m, n, k = 40, 24, 4  # |sum| <= 3 * 4 * 12 = 144: exact in both types.

    def on_rank(comm):
        a, b = d1_a(comm.rank, m, k).astype(numpy_dtype), d1_b(comm.rank, n, k).astype(numpy_dtype)
        out = fo.gemm_all_reduce(a, b, comm=comm)
        assert out.dtype == numpy_dtype
        return out.astype(np.float32)

    for out in fo.run_ranks(ranks, on_rank):
        np.testing.assert_array_equal(out, d1_sum(ranks, m, n, k))


@given(ranks=worlds, waves=st.integers(1, 12), data=st.data())
def test_any_partition_gives_the_same_bits(ranks, waves, data):
    partition = []
    while sum(partition) < waves:
        partition.append(data.draw(st.integers(1, waves - sum(partition))))

    def on_rank(comm):
        a, b = d1_a(comm.rank, 8 * waves, 16), d1_b(comm.rank, 8, 16)
        operator = fo.GemmAllReduce(comm, m=8 * waves, n=8, k=16, tile=(8, 8), partition=partition)
        assert operator.plan().partition == (partition if comm.size > 1 else operator.plan().partition)
        return operator(a, b)

    for out in fo.run_ranks(ranks, on_rank, num_threads=1):
        np.testing.assert_array_equal(out, d1_sum(ranks, 8 * waves, 8, 16))


def test_b07_one_operator_called_again_and_again():
    expected = {0: (-551, 8491), 10: (230, -14175), 20: (-120, -5408)}
    m, n, k = 512, 256, 128

    def on_rank(comm):
        operator = fo.GemmAllReduce(comm, m=m, n=n, k=k)
        for seed, (total, weighted) in expected.items():
            out = operator(d1_a(comm.rank + seed, m, k), d1_b(comm.rank + seed, n, k)).astype(np.int64)
            i, j = np.ogrid[:m, :n]
            assert (out.sum(), (out * (i % 13 + 1) * (j % 11 + 1)).sum()) == (total, weighted)

    fo.run_ranks(2, on_rank)


def test_b09_shapes_in_turn_in_one_communicator():
    shapes = [(1024, 256), (16, 256), (384, 1032)]

    def on_rank(comm):
        for step in range(12):
            m, n = shapes[step % 3]
            out = fo.gemm_all_reduce(d1_a(comm.rank, m, 32), d1_b(comm.rank, n, 32), comm=comm)
            np.testing.assert_array_equal(out, wanted[step % 3])

    wanted = [d1_sum(4, m, n, 32) for m, n in shapes]
    fo.run_ranks(4, on_rank)


def test_more_shapes_than_are_kept():
    def on_rank(comm):
        for m in [*range(1, 45), 1, 2]:
            out = fo.gemm_all_reduce(d1_a(comm.rank, m, 4), d1_b(comm.rank, 3, 4), comm=comm)
            np.testing.assert_array_equal(out, d1_sum(2, m, 3, 4))
        return len(comm._operators)

    assert fo.run_ranks(2, on_rank) == [32, 32]


def test_b23_workspace_limit_is_an_error_on_all_ranks_with_both_numbers():
    def on_rank(comm):
        with pytest.raises(MemoryError, match=r"\d{5,}.*65536|65536.*\d{5,}") as caught:
            fo.gemm_all_reduce(d1_a(0, 512, 8), d1_b(0, 512, 8), comm=comm)
        assert isinstance(caught.value, fo.OutOfMemoryError)
        return True

    assert fo.run_ranks(2, on_rank, workspace_limit_bytes=65536) == [True, True]


def test_timeline_has_what_ran():
    def on_rank(comm):
        timeline = fo.Timeline()
        operator = fo.GemmAllReduce(comm, m=256, n=64, k=32, tile=(32, 32))
        operator(d1_a(comm.rank, 256, 32), d1_b(comm.rank, 64, 32), timeline=timeline)
        return timeline

    timeline = fo.run_ranks(2, on_rank, num_threads=1)[1]
    kinds = [span["kind"] for span in timeline.spans]
    assert kinds.count("compute") == 16
    assert kinds.count("communication") > 1
    assert {span["rank"] for span in timeline.spans} == {1}
    assert "#" in timeline.to_text(60)
    assert '"ph"' in timeline.to_chrome_trace()


def test_interpreter_goes_on_while_a_call_waits():
    release = threading.Event()

    def on_rank(comm):
        if comm.rank == 0:
            # Would never be set if the call of rank 1 kept the interpreter's lock while it waits for rank 0.
            assert release.wait(60)
        else:
            threading.Timer(0.05, release.set).start()
        return fo.gemm_all_reduce(np.ones((4, 4), np.float32), np.ones((4, 4), np.float32), comm=comm)[0, 0]

    assert fo.run_ranks(2, on_rank) == [8, 8]
