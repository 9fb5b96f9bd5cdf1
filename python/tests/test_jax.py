"""JAX arrays, through DLPack."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import d1_a, d1_b, d1_sum

import flashoverlap as fo

jax = pytest.importorskip("jax", reason="jax is not installed")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_arrays_in_and_out(dtype):
    arrays = [
        (jax.numpy.asarray(d1_a(rank, 24, 4), dtype), jax.numpy.asarray(d1_b(rank, 16, 4), dtype)) for rank in range(2)
    ]

    def on_rank(comm):
        a, b = arrays[comm.rank]
        out = fo.gemm_all_reduce(a, b, comm=comm)
        with pytest.raises(ValueError, match="out is a JAX array, which is read-only"):
            fo.gemm_all_reduce(a, b, comm=comm, out=a)
        return out

    for out in fo.run_ranks(2, on_rank):
        assert isinstance(out, jax.Array)
        assert str(out.dtype) == dtype
        np.testing.assert_array_equal(np.asarray(out, np.float32), d1_sum(2, 24, 16, 4))
