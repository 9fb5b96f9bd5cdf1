"""The operators as PyTorch custom operators, so that torch.compile keeps each of them as one call.

Communicators travel as numbers, because custom operators take only tensors and plain values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _arrays
from .._options import share
from ..errors import UnsupportedError
from ..gathers import all_gather_gemm
from ..operators import gemm_all_reduce, gemm_reduce_scatter
from ..ranks import Communicator

_numbers = itertools.count(1)
_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def number_of(comm: Communicator) -> int:
    """The communicator's number; the same for as long as it lives."""
    number: int | None = getattr(comm, "_torch_number", None)
    if number is None:
        number = next(_numbers)
        comm._torch_number = number  # type: ignore[attr-defined]
        _communicators[number] = comm
    return number


def shares(total: int, size: int) -> list[int]:
    """Of ``total`` rows those that each rank owns: rank r of W has [r·total/W, (r+1)·total/W)."""
    return [share(total, size, rank) for rank in range(size)]


def _all_reduce(a: Tensor, b: Tensor, bias: Tensor | None, comm: int, method: str) -> Tensor:
    result: Tensor = gemm_all_reduce(a, b, bias=bias, comm=_communicators[comm], method=method)
    return result


def _reduce_scatter(a: Tensor, b: Tensor, bias: Tensor | None, comm: int, method: str) -> Tensor:
    result: Tensor = gemm_reduce_scatter(a, b, bias=bias, comm=_communicators[comm], method=method)
    return result


def _all_gather(x: Tensor, rows: int, comm: int) -> Tensor:
    communicator = _communicators[comm]
    if communicator.device is not None:
        raise UnsupportedError("all-gather of rows on a GPU: only the operators with a GEMM go there")
    out = x.new_empty((rows, x.shape[1]))
    counts = [count * x.shape[1] for count in shares(rows, communicator.size)]
    communicator._core.all_gather(
        _arrays.view(x.contiguous(), "x", ndim=2), _arrays.view(out, "out", ndim=2, writable=True), counts
    )
    return out


def _all_gather_gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, rows: int, comm: int, method: str
) -> tuple[Tensor, Tensor]:
    """The product, and the rows of all ranks."""
    gathered = a.new_empty((rows, a.shape[1]))
    out: Tensor = all_gather_gemm(a, b, bias=bias, comm=_communicators[comm], method=method, gathered=gathered)
    return out, gathered


def _fake_all_gather_gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, rows: int, comm: int, method: str
) -> tuple[Tensor, Tensor]:
    return a.new_empty((rows, b.shape[0])), a.new_empty((rows, a.shape[1]))


def _fake_all_reduce(a: Tensor, b: Tensor, bias: Tensor | None, comm: int, method: str) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def _fake_reduce_scatter(a: Tensor, b: Tensor, bias: Tensor | None, comm: int, method: str) -> Tensor:
    communicator = _communicators[comm]
    return a.new_empty((share(a.shape[0], communicator.size, communicator.rank), b.shape[0]))


def _fake_all_gather(x: Tensor, rows: int, comm: int) -> Tensor:
    return x.new_empty((rows, x.shape[1]))


def register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    if not hasattr(torch.library, "custom_op"):  # Before PyTorch 2.4: works, but torch.compile looks inside.
        return function
    operator = torch.library.custom_op(f"flashoverlap::{name}", function, mutates_args=())
    operator.register_fake(fake)
    return operator


all_reduce_op = register("gemm_all_reduce", _all_reduce, _fake_all_reduce)
reduce_scatter_op = register("gemm_reduce_scatter", _reduce_scatter, _fake_reduce_scatter)
all_gather_gemm_op = register("all_gather_gemm", _all_gather_gemm, _fake_all_gather_gemm)
all_gather_op = register("all_gather", _all_gather, _fake_all_gather)

__all__ = [
    "all_gather_gemm_op",
    "all_gather_op",
    "all_reduce_op",
    "number_of",
    "reduce_scatter_op",
    "register",
    "shares",
]
