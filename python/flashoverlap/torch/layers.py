"""Linear layers whose weight is split over the ranks. ``weight`` and ``bias`` have nn.Linear's names; a state dict with
the whole layer's tensors loads as well: each rank takes its part."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadArgumentError
from ..ranks import Communicator
from . import functions
from .ops import number_of


class _ParallelLinear(nn.Module):
    _SPLIT_AXIS = 0  # Of the weight [out_features, in_features].
    _BIAS_IS_SPLIT = False

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator,
        sequence_parallel: bool = False,
        method: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.comm = comm
        number_of(comm)  # Now, because torch.compile could not do it inside.
        self.sequence_parallel = sequence_parallel
        self.method = method
        whole = [out_features, in_features]
        if whole[self._SPLIT_AXIS] % comm.size != 0:
            axis = ("out_features", "in_features")[self._SPLIT_AXIS]
            raise BadArgumentError(f"{axis} is {whole[self._SPLIT_AXIS]}; expected a multiple of the {comm.size} ranks")
        shard = list(whole)
        shard[self._SPLIT_AXIS] //= comm.size
        self.weight = nn.Parameter(torch.empty(shard, device=device, dtype=dtype))
        bias_size = shard[0] if self._BIAS_IS_SPLIT else out_features
        self.bias = nn.Parameter(torch.empty(bias_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """nn.Linear's distribution for the whole layer. For equal bits with an unsharded layer load its weights."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            # Where every rank has the whole bias it must be the same one.
            (nn.init.uniform_(self.bias, -bound, bound) if self._BIAS_IS_SPLIT else nn.init.zeros_(self.bias))

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, comm: Communicator, *, sequence_parallel: bool = False, method: str = "auto"
    ) -> Any:
        """This rank's part of an unsharded layer, as a copy."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            comm=comm,
            sequence_parallel=sequence_parallel,
            method=method,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        layer.load_state_dict(linear.state_dict())
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(getattr(linear, name).requires_grad)
        return layer

    def shard_of(self, whole: Tensor, name: str) -> Tensor:
        """This rank's part of the whole layer's ``weight`` or ``bias``."""
        if name == "bias" and not self._BIAS_IS_SPLIT:
            return whole
        axis = 0 if name == "bias" else self._SPLIT_AXIS
        return whole.chunk(self.comm.size, axis)[self.comm.rank]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        whole = {"weight": [self.out_features, self.in_features], "bias": [self.out_features]}
        replaced = {}
        for name, shape in whole.items():
            tensor = state_dict.get(prefix + name)
            if tensor is not None and list(tensor.shape) == shape:
                replaced[prefix + name] = tensor
                state_dict[prefix + name] = self.shard_of(tensor, name)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        state_dict.update(replaced)

    def _require_features(self, x: Tensor, expected: int) -> None:
        if x.dim() < 1 or x.shape[-1] != expected:
            raise BadArgumentError(
                f"the input has shape {list(x.shape)} on rank {self.comm.rank}; expected [..., {expected}]"
            )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"ranks={self.comm.size}, sequence_parallel={self.sequence_parallel}"
        )


class RowParallelLinear(_ParallelLinear):
    """Each rank has in_features / W columns of the weight and of the input [..., in_features / W]; outputs are summed.

    out = sum over ranks + bias, [..., out_features] on every rank; the all-reduce overlaps with the GEMM. With
    sequence_parallel a rank gets its part of the first axis only (reduce-scatter).
    """

    _SPLIT_AXIS = 1

    def forward(self, x: Tensor) -> Tensor:
        self._require_features(x, self.weight.shape[1])
        function = functions.gemm_reduce_scatter if self.sequence_parallel else functions.gemm_all_reduce
        return function(x, self.weight, self.bias, comm=self.comm, method=self.method)


class ColumnParallelLinear(_ParallelLinear):
    """Each rank has out_features / W rows of the weight and computes those columns: [..., out_features / W].

    The input is the same on all ranks, and its gradient's all-reduce overlaps with the GEMM; with sequence_parallel
    the ranks have parts of its first axis, which are gathered, and the gradient's reduce-scatter overlaps.
    """

    _SPLIT_AXIS = 0
    _BIAS_IS_SPLIT = True

    def forward(self, x: Tensor) -> Tensor:
        self._require_features(x, self.in_features)
        function = functions.all_gather_gemm if self.sequence_parallel else functions.copy_gemm
        return function(x, self.weight, self.bias, comm=self.comm, method=self.method)


__all__: list[str] = ["ColumnParallelLinear", "RowParallelLinear"]
