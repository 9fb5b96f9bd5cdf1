"""Layers and communicators for PyTorch. Importing this imports torch.

    comm = flashoverlap.torch.communicator()          # of torch.distributed's default group
    layer = flashoverlap.torch.RowParallelLinear(4096, 1024, comm=comm)

Tensors are in host memory; their gradients flow, and both directions overlap where there is something to exchange.
"""

from __future__ import annotations

from .communicator import communicator
from .functions import (
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from .layers import ColumnParallelLinear, RowParallelLinear
from .moe import MoE
from .replace import LLAMA_PLAN, replace_linear_layers

__all__ = [
    "LLAMA_PLAN",
    "ColumnParallelLinear",
    "MoE",
    "RowParallelLinear",
    "all_gather_gemm",
    "communicator",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "replace_linear_layers",
]
