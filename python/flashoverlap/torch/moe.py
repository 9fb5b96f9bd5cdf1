"""The mixture-of-experts layer as a module that trains."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .. import _arrays, _core, moe
from .._devices import on_host
from ..errors import BadArgumentError
from ..ranks import Communicator
from .ops import register

_numbers = itertools.count(1)
_runners: weakref.WeakValueDictionary[int, _Runner] = weakref.WeakValueDictionary()


class _Runner:
    """The layer of one module, and what it knows of its last call. Custom operators name it by ``number``."""

    def __init__(self, layer: moe.MoeLayer, top_k: int, gate: str, renormalise: bool, method: str) -> None:
        self.layer = layer
        self.top_k, self.gate, self.renormalise, self.method = top_k, gate, renormalise, method
        self.number = next(_numbers)
        self.calls = 0
        self.routed: moe.Routing | None = None
        _runners[self.number] = self

    def forward(self, x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        self.calls += 1
        self.routed = moe.route(logits, self.top_k, gate=self.gate, renormalise=self.renormalise)
        out: Tensor = self.layer(x, self.routed, w_up, w_down, method=self.method)
        return out

    def of_logits(self, logits: Tensor, of_weights: Tensor) -> Tensor:
        assert self.routed is not None
        flat = _core.route_gradient(
            _arrays.view(on_host(logits), "logits", ndim=2),
            self.gate,
            self.renormalise,
            self.routed,
            of_weights.flatten().tolist(),
        )
        return torch.tensor(flat, dtype=logits.dtype, device=logits.device).reshape(logits.shape)


def _forward(x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, runner: int) -> tuple[Tensor, Tensor]:
    """The result, and the number of this call."""
    one = _runners[runner]
    out = one.forward(x, logits, w_up, w_down)
    return out, torch.tensor(one.calls)


def _fake_forward(x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, runner: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty((), dtype=torch.int64)


def _backward(
    gradient: Tensor,
    x: Tensor,
    logits: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    call: Tensor,
    runner: int,
    wants_up: bool,
    wants_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x, logits, w_up and w_down; empty where not wanted."""
    one = _runners[runner]
    if one.calls != int(call):
        one.forward(x, logits, w_up, w_down)  # The layer keeps the rows of its last call only.
    floats = {"dtype": torch.float32, "device": x.device}
    of_weights = torch.empty((x.shape[0], one.top_k), **floats)
    of_up = torch.empty(w_up.shape if wants_up else (0,), **floats)
    of_down = torch.empty(w_down.shape if wants_down else (0,), **floats)
    of_x: Tensor = one.layer.backward(
        gradient.contiguous(),
        w_up,
        w_down,
        weights_gradient=of_weights,
        w_up_gradient=of_up if wants_up else None,
        w_down_gradient=of_down if wants_down else None,
        method=one.method,
    )
    return of_x, one.of_logits(logits, of_weights), of_up.to(w_up.dtype), of_down.to(w_down.dtype)


def _fake_backward(
    gradient: Tensor,
    x: Tensor,
    logits: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    call: Tensor,
    runner: int,
    wants_up: bool,
    wants_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        logits.new_empty(logits.shape),
        w_up.new_empty(w_up.shape if wants_up else (0,)),
        w_down.new_empty(w_down.shape if wants_down else (0,)),
    )


forward_op = register("moe_layer", _forward, _fake_forward)
backward_op = register("moe_layer_backward", _backward, _fake_backward)


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, runner: int) -> Tensor:
        out: Tensor
        out, call = forward_op(x, logits, w_up, w_down, runner)
        context.save_for_backward(x, logits, w_up, w_down, call)
        context.runner = runner
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wants = context.needs_input_grad
        gradients = backward_op(gradient, *context.saved_tensors, context.runner, wants[2], wants[3])
        return (*(one if wanted else None for one, wanted in zip(gradients, wants[:4], strict=True)), None)


class MoE(nn.Module):
    """Top-k routed SwiGLU experts, spread over the ranks: [..., H] gives [..., H]; each rank has tokens of its own.

    ``router`` [E, H] is the same on all ranks (start from equal values, and sum its gradient over the ranks, as with
    any data-parallel parameter); ``w_up`` [local experts, 2 I, H] has gate above up; ``w_down`` [local experts, H, I].
    All ranks call forward and backward in the same order. overlap_if, machine, transport: as in
    ``flashoverlap.MoeLayer``. The parameters are made on the communicator's device; on a GPU dtype must be float16 or
    bfloat16, and which experts a token goes to is decided on the host, which waits for the logits.
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
        overlap_if: str = "always",
        machine: Any = None,
        transport: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise BadArgumentError(f"top_k is {top_k}; expected 1 to the {num_experts} experts")
        self.comm = comm
        place: dict[str, Any] = {"dtype": dtype, "device": comm.device}
        self.router = nn.Parameter(torch.empty(num_experts, hidden, **place))
        layer = moe.MoeLayer(
            comm,
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            dtype=self.router.dtype,
            capacity=capacity,
            overlap_if=overlap_if,
            machine=machine,
            transport=transport,
        )
        self._runner = _Runner(layer, top_k, gate, renormalise, method)
        self._number = self._runner.number  # A plain number: torch.compile can look at it.
        experts = layer.local_experts
        self.w_up = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden, **place))
        self.w_down = nn.Parameter(torch.empty(experts, hidden, intermediate, **place))
        for parameter, fan_in in ((self.router, hidden), (self.w_up, hidden), (self.w_down, intermediate)):
            bound = 1 / math.sqrt(max(1, fan_in))
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def report(self) -> dict[str, Any]:
        """What the last call did on this rank."""
        return self._runner.layer.report

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 1 or x.shape[-1] != self.router.shape[1]:
            raise BadArgumentError(
                f"the input has shape {list(x.shape)} on rank {self.comm.rank}; expected [..., {self.router.shape[1]}]"
            )
        matrix = x.reshape(-1, x.shape[-1])
        logits = nn.functional.linear(matrix, self.router)
        out: Tensor = _Moe.apply(matrix, logits, self.w_up, self.w_down, self._number)
        return out.reshape(x.shape)


__all__ = ["MoE"]
