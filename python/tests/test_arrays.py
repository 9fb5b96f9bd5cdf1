"""Case B27 and its kin: strided, transposed, broadcast, read-only, overlapping, misplaced and mistyped arrays."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import d1_a, d1_b, d1_sum, poisoned
from hypothesis import given
from hypothesis import strategies as st

import flashoverlap as fo

M, N, K, RANKS = 64, 64, 32, 2


def layouts(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """The same values laid out in every way that NumPy has, with NaN in whatever lies between."""
    rows, cols = matrix.shape
    every_other_row = poisoned((2 * rows, cols))
    every_other_row[::2] = matrix
    every_other_col = poisoned((rows, 2 * cols))
    every_other_col[:, ::2] = matrix
    padded = poisoned((rows, cols + 8))
    padded[:, :cols] = matrix
    offset = poisoned((rows + 3, cols + 5))
    offset[2 : rows + 2, 3 : cols + 3] = matrix
    return {
        "contiguous": matrix.copy(),
        "every other row": every_other_row[::2],
        "every other column": every_other_col[:, ::2],
        "transposed": np.ascontiguousarray(matrix.T).T,
        "row stride k+8": padded[:, :cols],
        "inner part": offset[2 : rows + 2, 3 : cols + 3],
        "reversed rows": matrix[::-1].copy()[::-1],
        "reversed columns": matrix[:, ::-1].copy()[:, ::-1],
        "Fortran order": np.asfortranarray(matrix),
    }


@pytest.mark.parametrize("of_a", sorted(layouts(np.zeros((2, 2), np.float32))))
@pytest.mark.parametrize("of_b", ["contiguous", "transposed", "every other row", "every other column"])
def test_b27_every_layout_gives_the_same_bits(of_a, of_b):
    def on_rank(comm):
        a, b = layouts(d1_a(comm.rank, M, K))[of_a], layouts(d1_b(comm.rank, N, K))[of_b]
        kept = a.copy(), b.copy()
        outs = [
            fo.gemm_all_reduce(a, b, comm=comm, out=poisoned((M, N))),
            fo.gemm_reduce_scatter(a, b, comm=comm),
        ]
        np.testing.assert_array_equal(a, kept[0])
        np.testing.assert_array_equal(b, kept[1])
        return outs

    expected = d1_sum(RANKS, M, N, K)
    results = fo.run_ranks(RANKS, on_rank)
    for rank, (whole, part) in enumerate(results):
        np.testing.assert_array_equal(whole, expected)
        np.testing.assert_array_equal(part, expected[rank * M // RANKS : (rank + 1) * M // RANKS])


def test_b27_broadcast_inputs():
    def on_rank(comm):
        row = d1_a(comm.rank, 1, K)
        col = d1_b(comm.rank, N, 1)
        a, b = np.broadcast_to(row, (M, K)), np.broadcast_to(col, (N, K))
        assert a.strides[0] == 0
        assert b.strides[1] == 0
        out = fo.gemm_all_reduce(a, b, comm=comm, bias=np.broadcast_to(np.float32(3), (N,)))
        return out, a.copy() @ b.copy().T

    results = fo.run_ranks(RANKS, on_rank)
    for out, _ in results:
        np.testing.assert_array_equal(out, sum(partial for _, partial in results) + 3)


@given(
    row_step=st.sampled_from([-2, -1, 1, 2, 3]),
    col_step=st.sampled_from([-3, -1, 1, 2]),
    transpose=st.booleans(),
    m=st.integers(1, 20),
    k=st.integers(1, 20),
    dtype=st.sampled_from([np.float32, np.float16]),
)
def test_b27_any_strides(row_step, col_step, transpose, m, k, dtype):
    def on_rank(comm):
        whole = poisoned((3 * k, 3 * m) if transpose else (3 * m, 3 * k), dtype)
        base = whole.T if transpose else whole
        a = base[::row_step, ::col_step][:m, :k]
        a[...] = d1_a(comm.rank, m, k)
        return fo.gemm_all_reduce(a, d1_b(comm.rank, 5, k).astype(dtype), comm=comm)

    for out in fo.run_ranks(RANKS, on_rank):
        np.testing.assert_array_equal(out, d1_sum(RANKS, m, 5, k))


def test_b27_out_with_a_row_stride_leaves_what_lies_between():
    def on_rank(comm):
        big = poisoned((M, N + 8))
        out = fo.gemm_all_reduce(d1_a(comm.rank, M, K), d1_b(comm.rank, N, K), comm=comm, out=big[:, :N])
        assert np.isnan(big[:, N:]).all()
        return out

    for out in fo.run_ranks(RANKS, on_rank):
        np.testing.assert_array_equal(out, d1_sum(RANKS, M, N, K))


def arrays(comm: fo.Communicator) -> dict[str, np.ndarray]:
    return {"a": d1_a(comm.rank, M, K), "b": d1_b(comm.rank, N, K), "out": poisoned((M, N))}


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def block_of(array: np.ndarray) -> np.ndarray:
    """[M, N] that begins inside `array`'s memory."""
    return np.lib.stride_tricks.as_strided(array, (M, N), (4, 4), writeable=True)


BIG = poisoned((M, 2 * N))

WRONG = {
    "out every other column": (
        lambda x: {"out": BIG[:, ::2]},
        ValueError,
        r"out \[64, 64\] has strides \[128, 2\] \(elements\); expected rows of consecutive elements",
    ),
    "out transposed": (lambda x: {"out": poisoned((N, M)).T}, ValueError, r"out \[64, 64\] has strides \[1, 64\]"),
    "out rows overlap": (lambda x: {"out": block_of(poisoned((M, N)))}, ValueError, r"out .* has strides \[1, 1\]"),
    "out read-only": (lambda x: {"out": read_only(poisoned((M, N)))}, ValueError, r"out \[64, 64\] is read-only"),
    "out too small": (
        lambda x: {"out": poisoned((M - 1, N))},
        ValueError,
        r"out has shape \[63, 64\]; expected \[output rows, n\] = \[64, 64\]",
    ),
    "out of 64-bit floats": (lambda x: {"out": poisoned((M, N), np.float64)}, TypeError, "out has type float64"),
    "out of another type": (
        lambda x: {"out": np.zeros((M, N), np.float16)},
        TypeError,
        "out has type float16; expected float32 as a has",
    ),
    "out of one axis": (
        lambda x: {"out": poisoned((M * N,))},
        ValueError,
        r"out has shape \[4096\]; expected a matrix",
    ),
    "a of integers": (lambda x: {"a": x["a"].astype(np.int32)}, TypeError, "a has type int32; expected float32"),
    "a of the other byte order": (lambda x: {"a": x["a"].astype(">f4")}, TypeError, "of the other byte order"),
    "a of three axes": (lambda x: {"a": x["a"][None]}, ValueError, r"a has shape \[1, 64, 32\]; expected a matrix"),
    "a is a list": (lambda x: {"a": [[1.0]]}, TypeError, "a is a list; expected an array"),
    "a is None": (lambda x: {"a": None}, TypeError, "a is a NoneType; expected an array"),
    "b of another type": (
        lambda x: {"b": x["b"].astype(np.float16)},
        TypeError,
        "b has type float16; expected float32 as a has",
    ),
    "b as [k, n]": (
        lambda x: {"b": np.ascontiguousarray(x["b"].T)},
        ValueError,
        r"a has shape \[64, 32\] and b \[32, 64\]; expected a \[m, k\] and b \[n, k\]",
    ),
    "out is a": (
        lambda x: {"a": x["out"][:, :K], "out": x["out"]},
        ValueError,
        r"out \[64, 64\].* overlaps a \[64, 32\]",
    ),
    "out lies in a strided b": (
        lambda x: {"b": BIG[:, 0 : 2 * K : 2], "out": BIG[:, :N]},
        ValueError,
        "out .*overlaps b",
    ),
    "bias too long": (
        lambda x: {"bias": np.zeros(N + 1, np.float32)},
        ValueError,
        r"bias has shape \[65\]; expected \[n\] = \[64\]",
    ),
    "bias a matrix": (lambda x: {"bias": np.zeros((1, N), np.float32)}, ValueError, "bias .*expected a vector"),
    "residual too small": (
        lambda x: {"residual": np.zeros((M, N - 1), np.float32)},
        ValueError,
        r"residual has shape \[64, 63\]; expected \[output rows, n\]",
    ),
    "residual_out alone": (
        lambda x: {"residual_out": poisoned((M, N))},
        ValueError,
        "residual_out is given without residual",
    ),
    "residual_out is out": (
        lambda x: {"residual": np.zeros((M, N), np.float32), "residual_out": x["out"]},
        ValueError,
        "overlaps",
    ),
    "activation": (
        lambda x: {"activation": "tanh"},
        ValueError,
        "activation is 'tanh'; expected None or one of none, relu",
    ),
    "eps": (lambda x: {"rms_norm_eps": float("nan")}, ValueError, "rms_norm_eps is nan"),
    "method": (lambda x: {"method": "fast"}, ValueError, "method is 'fast'; expected one of auto, overlap, serial"),
    "partition word": (lambda x: {"partition": "all"}, ValueError, "partition is 'all'; expected 'auto' or the waves"),
    "partition sum": (lambda x: {"partition": [1000]}, ValueError, "1000"),
    "partition zero": (lambda x: {"partition": [0, 1]}, ValueError, r"partition is \[0, 1\]; expected"),
    "tile": (lambda x: {"tile": (0, 8)}, ValueError, r"tile is \(0, 8\); expected"),
    "tile of fractions": (lambda x: {"tile": (8.5, 8)}, ValueError, r"tile is \(8\.5, 8\); expected"),
    "stream": (lambda x: {"stream": 7}, ValueError, "stream is 7; calls on the CPU have none"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_what_does_not_fit_is_an_error_on_every_rank_and_writes_nothing(name):
    change, kind, message = WRONG[name]

    def on_rank(comm):
        arguments = arrays(comm)
        arguments.update(change(arguments))
        BIG.fill(np.nan)
        with pytest.raises(kind, match=message) as caught:
            fo.gemm_all_reduce(**arguments, comm=comm)
        assert isinstance(caught.value, fo.Error)
        out = arguments["out"]
        assert np.isnan(out).all() or name == "out of another type"  # That one is zeros.

    fo.run_ranks(RANKS, on_rank)


@pytest.mark.parametrize("name", ["out read-only", "a of integers", "b as [k, n]", "activation"])
def test_an_error_on_one_rank_is_an_error_on_every_rank_and_the_communicator_lives(name):
    change, kind, message = WRONG[name]

    def on_rank(comm):
        arguments = arrays(comm)
        wrong = {**arguments, **change(arguments)} if comm.rank == 1 else arguments
        expected = kind if comm.rank == 1 else fo.CommunicationError
        with pytest.raises(expected, match=message) as caught:
            fo.gemm_all_reduce(**wrong, comm=comm)
        if comm.rank != 1:
            assert "rank 1 cannot take part in gemm-all-reduce" in str(caught.value)
        return fo.gemm_all_reduce(**arrays(comm), comm=comm)

    for out in fo.run_ranks(3, on_rank):
        np.testing.assert_array_equal(out, d1_sum(3, M, N, K))


def test_ranks_with_different_shapes_hear_of_each_other():
    def on_rank(comm):
        a, b = d1_a(0, M + comm.rank, K), d1_b(0, N, K)
        with pytest.raises(
            ValueError, match=r"ranks disagree: rank 0 calls gemm-all-reduce m=64 .* rank 1 calls .*m=65"
        ):
            fo.gemm_all_reduce(a, b, comm=comm)
        with pytest.raises(ValueError, match=r"ranks disagree: .*method=overlap.*method=serial"):
            fo.gemm_all_reduce(a[:M], b, comm=comm, method=["overlap", "serial"][comm.rank])

    fo.run_ranks(2, on_rank)


def test_wrong_destinations():
    def on_rank(comm):
        a, b = d1_a(0, 4, K), d1_b(0, N, K)
        for destinations, message in {
            (0, 1, 2, 0): r"destinations\[2\] is 2; expected a rank from 0 to 1",
            (0, 1): r"destinations has 2 entries; expected one for each of the 4 rows of a \[4, 32\]",
            (0, 1, 0.5, 1): "destinations is .*expected one rank for each row",
        }.items():
            with pytest.raises(ValueError, match=message):
                fo.gemm_all_to_all(a, b, destinations, comm=comm)
        if comm.rank == 0:  # Gets all 8 rows.
            with pytest.raises(ValueError, match=r"out has shape \[4, 64\]; expected \[output rows, n\] = \[8, 64\]"):
                fo.gemm_all_to_all(a, b, [0] * 4, comm=comm, out=poisoned((4, N)))
        else:
            with pytest.raises(
                fo.CommunicationError, match=r"rank 0 cannot take part in gemm-all-to-all.*out has shape"
            ):
                fo.gemm_all_to_all(a, b, [0] * 4, comm=comm, out=poisoned((0, N)))

    fo.run_ranks(2, on_rank)


def test_comm_of_another_class():
    with pytest.raises(TypeError, match=r"comm is a int; expected a flashoverlap\.Communicator"):
        fo.gemm_all_reduce(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32), comm=3)


def test_operator_of_another_shape_or_type():
    def on_rank(comm):
        operator = fo.GemmAllReduce(comm, m=M, n=N, k=K)
        a, b = d1_a(0, M, K), d1_b(0, N, K)
        with pytest.raises(ValueError, match=r"a has shape \[63, 32\]; expected \[m, k\] = \[64, 32\]"):
            operator(a[1:], b)
        with pytest.raises(TypeError, match="a has type float16; this operator was made for float32"):
            operator(a.astype(np.float16), b.astype(np.float16))
        with pytest.raises(ValueError, match="m is -1; expected an integer >= 0"):
            fo.GemmAllReduce(comm, m=-1, n=N, k=K)
        with pytest.raises(TypeError, match="dtype is 'float64'; expected float32, float16 or bfloat16"):
            fo.GemmAllReduce(comm, m=1, n=N, k=K, dtype="float64")
        with pytest.raises(ValueError, match="rows is 'odd'; expected 'contiguous' or 'block-cyclic'"):
            fo.GemmReduceScatter(comm, m=1, n=N, k=K, rows="odd")

    fo.run_ranks(2, on_rank)


class OnCuda:
    """An array as CuPy or PyTorch would show it, on a device that is not there."""

    shape = (M, K)
    dtype = np.dtype(np.float32)

    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, **_):
        raise AssertionError("nobody should ask for it")


class OnCudaInterface:
    __cuda_array_interface__ = {"shape": (M, K), "typestr": "<f4", "data": (1 << 40, False), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (OnCuda(), r"a \(OnCuda\) is on device CUDA:1; the communicator computes on the CPU, so expected"),
        (OnCudaInterface(), r"a \(OnCudaInterface\) is in CUDA memory of device 0; .* in host memory"),
    ],
)
def test_arrays_on_a_gpu_are_refused(array, message):
    def on_rank(comm):
        with pytest.raises(ValueError, match=message):
            fo.gemm_all_reduce(array, d1_b(0, N, K), comm=comm)

    fo.run_ranks(2, on_rank)


class Lender:
    """Any class with __dlpack__ will do."""

    def __init__(self, array):
        self.array = array
        self.dtype = array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return (1, 0)


def test_any_class_with_dlpack_is_an_array_without_a_copy():
    def on_rank(comm):
        out = poisoned((M, N))
        fo.gemm_all_reduce(Lender(d1_a(comm.rank, M, K)), Lender(d1_b(comm.rank, N, K)), comm=comm, out=Lender(out))
        return out

    for out in fo.run_ranks(2, on_rank):
        np.testing.assert_array_equal(out, d1_sum(2, M, N, K))


def test_read_only_through_dlpack():
    def on_rank(comm):
        with pytest.raises(ValueError, match=r"out \(Lender\) is read-only"):
            fo.gemm_all_reduce(d1_a(0, M, K), d1_b(0, N, K), comm=comm, out=Lender(read_only(poisoned((M, N)))))

    fo.run_ranks(1, on_rank)


def test_b39_inputs_may_go_at_once():
    def on_rank(comm):
        for _ in range(20):
            a, b = d1_a(comm.rank, 512, 64), d1_b(comm.rank, 256, 64)
            out = fo.gemm_all_reduce(a, b, comm=comm)
            del a, b
            poisoned((512, 64))
            np.testing.assert_array_equal(out, expected)

    expected = d1_sum(2, 512, 256, 64)
    fo.run_ranks(2, on_rank)
