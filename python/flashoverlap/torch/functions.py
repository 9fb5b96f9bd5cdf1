"""GEMMs with an exchange, with gradients. Matrices as everywhere: x [rows, k], weight [n, k], on each rank its part.

Where the gradient needs an exchange of its own, that one overlaps with its GEMM as well:

    function              forward                       gradient of x                     gradient of the weight
    gemm_all_reduce       GEMM + all-reduce             local                             local
    copy_gemm             local                         GEMM + all-reduce                 local
    gemm_reduce_scatter   GEMM + reduce-scatter         all-gather + GEMM                 local, of what was gathered
    all_gather_gemm       all-gather + GEMM             GEMM + reduce-scatter             local, of x gathered again
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import BadArgumentError
from ..ranks import Communicator
from .ops import all_gather_gemm_op, all_gather_op, all_reduce_op, number_of, reduce_scatter_op, shares

_Gradients = tuple[Tensor | None, ...]


def _weight_gradient(context: Any, gradient: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias."""
    weight = gradient.t().mm(x) if context.needs_input_grad[1] else None
    bias = gradient.sum(0) if context.needs_input_grad[2] else None
    return weight, bias


class _GemmAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: int, method: str) -> Tensor:
        context.save_for_backward(x, weight)
        result: Tensor = all_reduce_op(x, weight, bias, comm, method)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> _Gradients:
        x, weight = context.saved_tensors
        of_x = gradient.mm(weight) if context.needs_input_grad[0] else None
        return (of_x, *_weight_gradient(context, gradient, x), None, None)


class _CopyGemm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: int, method: str) -> Tensor:
        context.save_for_backward(x, weight)
        context.comm, context.method = comm, method
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> _Gradients:
        x, weight = context.saved_tensors
        of_x = None
        if context.needs_input_grad[0]:
            of_x = all_reduce_op(gradient, weight.t(), None, context.comm, context.method)
        return (of_x, *_weight_gradient(context, gradient, x), None, None)


class _GemmReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: int, method: str) -> Tensor:
        context.save_for_backward(x, weight)
        context.comm, context.method = comm, method
        result: Tensor = reduce_scatter_op(x, weight, bias, comm, method)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> _Gradients:
        x, weight = context.saved_tensors
        of_x, whole = all_gather_gemm_op(gradient, weight.t(), None, x.shape[0], context.comm, context.method)
        return (of_x, *_weight_gradient(context, whole, x), None, None)


class _AllGatherGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: int, method: str, rows: int
    ) -> Tensor:
        context.save_for_backward(x, weight)
        context.comm, context.method, context.rows = comm, method, rows
        out: Tensor = all_gather_gemm_op(x, weight, bias, rows, comm, method)[0]
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> _Gradients:
        x, weight = context.saved_tensors
        of_x = None
        if context.needs_input_grad[0]:
            of_x = reduce_scatter_op(gradient, weight.t(), None, context.comm, context.method)
        # Gathered again rather than kept: the shards of all layers together are what sequence parallelism saves.
        whole = all_gather_op(x.contiguous(), context.rows, context.comm) if context.needs_input_grad[1] else gradient
        return (of_x, *_weight_gradient(context, gradient, whole), None, None, None)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def gemm_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, comm: Communicator, method: str = "auto"
) -> Tensor:
    """sum over ranks of x_r [..., k] · weight_r [n, k]ᵀ, + bias [n] once: [..., n] on every rank."""
    out: Tensor = _GemmAllReduce.apply(_as_matrix(x), weight, bias, number_of(comm), method)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def copy_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, comm: Communicator, method: str = "auto"
) -> Tensor:
    """x [..., k], the same on all ranks, · weight_r [n, k]ᵀ + bias_r [n]: this rank's [..., n].

    Nothing is exchanged; the gradient of x is the sum over ranks.
    """
    out: Tensor = _CopyGemm.apply(_as_matrix(x), weight, bias, number_of(comm), method)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _require_even(rows: int, x: Tensor, comm: Communicator) -> None:
    """Shards of rows are shards of the first axis only where that one divides."""
    inner = max(1, _as_matrix(x).shape[0] // max(1, x.shape[0]))
    if inner > 1 and (rows // inner) % comm.size != 0:
        raise BadArgumentError(
            f"the sequence has {rows // inner} positions of shape {list(x.shape[1:-1])}; expected a multiple of the "
            f"{comm.size} ranks"
        )


def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, comm: Communicator, method: str = "auto"
) -> Tensor:
    """This rank's part, along the first axis, of the sum over ranks of x_r [s, ..., k] · weight_r [n, k]ᵀ, + bias once.

    Rank r of W gets positions [r·s/W, (r+1)·s/W) of the first axis; s must be a multiple of W unless x is a matrix.
    """
    matrix = _as_matrix(x)
    _require_even(matrix.shape[0], x, comm)
    out: Tensor = _GemmReduceScatter.apply(matrix, weight, bias, number_of(comm), method)
    positions = shares(x.shape[0], comm.size)[comm.rank]
    return out.reshape(positions, *x.shape[1:-1], weight.shape[0])


def all_gather_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    comm: Communicator,
    positions: int | None = None,
    method: str = "auto",
) -> Tensor:
    """All ranks' x [s_r, ..., k], one after the other along the first axis, · weight_r [n, k]ᵀ + bias_r: [s, ..., n].

    positions: s; None: s_r · W. Rank r must have positions [r·s/W, (r+1)·s/W).
    """
    whole = x.shape[0] * comm.size if positions is None else positions
    if shares(whole, comm.size)[comm.rank] != x.shape[0]:
        raise BadArgumentError(
            f"x has shape {list(x.shape)} on rank {comm.rank}; of {whole} positions expected "
            f"{shares(whole, comm.size)[comm.rank]} there"
        )
    matrix = _as_matrix(x)
    inner = 1
    for size in x.shape[1:-1]:
        inner *= size
    _require_even(whole * inner, x, comm)
    out: Tensor = _AllGatherGemm.apply(matrix, weight, bias, number_of(comm), method, whole * inner)
    return out.reshape(whole, *x.shape[1:-1], weight.shape[0])
