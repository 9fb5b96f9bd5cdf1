"""The mixture-of-experts layer as a module that trains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import _arrays, _core, moe
from ..errors import BadArgumentError
from ..ranks import Communicator


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, module: MoE) -> Tensor:
        routed = moe.route(logits, module.top_k, gate=module.gate, renormalise=module.renormalise)
        context.save_for_backward(x, logits, w_up, w_down)
        context.module, context.routed = module, routed
        out: Tensor = module._run(x, routed, w_up, w_down)
        context.call = module._calls
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, logits, w_up, w_down = context.saved_tensors
        module, routed = context.module, context.routed
        if module._calls != context.call:
            # The layer keeps the rows of its last call only.
            module._run(x, routed, w_up, w_down)
            context.call = module._calls
        of_weights = torch.empty((routed.tokens, routed.top_k))
        of_up = torch.empty(w_up.shape) if context.needs_input_grad[2] else None
        of_down = torch.empty(w_down.shape) if context.needs_input_grad[3] else None
        of_x = module._layer.backward(
            gradient.contiguous(),
            w_up,
            w_down,
            weights_gradient=of_weights,
            w_up_gradient=of_up,
            w_down_gradient=of_down,
            method=module.method,
        )
        of_logits = None
        if context.needs_input_grad[1]:
            flat = _core.route_gradient(
                _arrays.view(logits, "logits", ndim=2),
                module.gate,
                module.renormalise,
                routed,
                of_weights.flatten().tolist(),
            )
            of_logits = torch.tensor(flat, dtype=logits.dtype).reshape(logits.shape)
        return (
            of_x,
            of_logits,
            None if of_up is None else of_up.to(w_up.dtype),
            None if of_down is None else of_down.to(w_down.dtype),
            None,
        )


class MoE(nn.Module):
    """Top-k routed SwiGLU experts, spread over the ranks: [..., H] gives [..., H]; each rank has tokens of its own.

    ``router`` [E, H] is the same on all ranks (start from equal values, and sum its gradient over the ranks, as with
    any data-parallel parameter); ``w_up`` [local experts, 2 I, H] has gate above up; ``w_down`` [local experts, H, I].
    All ranks call forward and backward in the same order. torch.compile breaks the graph here.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        comm: Communicator,
        gate: str = "softmax",
        renormalise: bool = True,
        capacity: int = 0,
        method: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise BadArgumentError(f"top_k is {top_k}; expected 1 to the {num_experts} experts")
        self.comm, self.top_k, self.gate = comm, top_k, gate
        self.renormalise, self.method = renormalise, method
        self.router = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype))
        self._layer = moe.MoeLayer(
            comm,
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            dtype=self.router.dtype,
            capacity=capacity,
        )
        experts = self._layer.local_experts
        self.w_up = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(experts, hidden, intermediate, dtype=dtype))
        self._calls = 0
        for parameter, fan_in in ((self.router, hidden), (self.w_up, hidden), (self.w_down, intermediate)):
            bound = 1 / math.sqrt(max(1, fan_in))
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def report(self) -> dict[str, Any]:
        """What the last call did on this rank."""
        return self._layer.report

    def _run(self, x: Tensor, routed: moe.Routing, w_up: Tensor, w_down: Tensor) -> Tensor:
        self._calls += 1
        with torch.no_grad():
            out: Tensor = self._layer(x, routed, w_up, w_down, method=self.method)
        return out

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 1 or x.shape[-1] != self.router.shape[1]:
            raise BadArgumentError(
                f"the input has shape {list(x.shape)} on rank {self.comm.rank}; expected [..., {self.router.shape[1]}]"
            )
        matrix = x.reshape(-1, x.shape[-1])
        logits = nn.functional.linear(matrix, self.router)
        out: Tensor = _Moe.apply(matrix, logits, self.w_up, self.w_down, self)
        return out.reshape(x.shape)


__all__ = ["MoE"]
