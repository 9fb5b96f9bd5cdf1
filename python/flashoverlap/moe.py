"""The mixture-of-experts layer, with both all-to-alls hidden behind the expert GEMMs.

out[t] = sum over slots s of weight[t, s] · expert_{ids[t, s]}(x[t]), in float32 in the order of the slots;
expert(x) = w_down · (activation(w_gate · x) * (w_up · x)), without gate w_down · activation(w_up · x).

Rank r of W has experts [r·E/W, (r+1)·E/W) of E, rounded down; tokens may differ in number between ranks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

from . import _arrays, _core
from ._agreement import agree, operator_for, require_communicator
from ._devices import HOST, framework_of, hold, on_host, stream_of
from ._options import carried_out, count, integers, tile_list
from .errors import ArgumentTypeError, BadArgumentError
from .planning import MachineProfile, Plan, profile_of
from .ranks import Communicator

Routing = _core.MoeRouting

_CONSUMERS_ON_GPU = 16  # As the command has it.


def route(logits: Any, top_k: int, *, gate: str = "softmax", renormalise: bool = False) -> Routing:
    """The top_k experts of each token by score; of equal scores the lower expert comes first. logits: [tokens, E].

    gate: "softmax" or "sigmoid". renormalise: divide a token's weights by their sum. A logit of -infinity closes an
    expert to the token. Logits on a GPU are copied to the host, which waits for them.
    """
    return _core.route_tokens(_arrays.view(on_host(logits), "logits", ndim=2), gate, int(top_k), bool(renormalise))


def routing(ids: Any, weights: Any, num_experts: int) -> Routing:
    """From experts [tokens, top_k] (integers; -1: none) and weights [tokens, top_k], as lists or arrays."""
    shape = _shape_of(ids, "ids")
    if _shape_of(weights, "weights") != shape:
        raise BadArgumentError(
            f"ids has shape {shape} and weights {_shape_of(weights, 'weights')}; expected equal ones"
        )
    made = Routing(
        shape[0],
        int(num_experts),
        shape[1],
        integers(_flat(ids), "ids", "integers"),
        [float(weight) for weight in _flat(weights)],
    )
    made.check()
    return made


def _shape_of(values: Any, name: str) -> list[int]:
    shape = getattr(values, "shape", None)
    if shape is None:
        rows = [len(row) for row in values]
        if len(set(rows)) > 1:
            raise BadArgumentError(f"{name} has rows of {min(rows)} to {max(rows)} entries; expected as many in each")
        shape = (len(rows), rows[0] if rows else 1)
    if len(shape) != 2:
        raise BadArgumentError(f"{name} has shape {list(shape)}; expected [tokens, top_k]")
    return [int(size) for size in shape]


def _flat(values: Any) -> list[Any]:
    rows = values.tolist() if hasattr(values, "tolist") else values
    return [entry for row in rows for entry in row]


def _controller(fields: Mapping[str, float] | None) -> _core.MoeControllerOptions:
    options = _core.MoeControllerOptions()
    accepted = [name for name in dir(options) if not name.startswith("_")]
    for name, value in (fields or {}).items():
        if name not in accepted:
            raise BadArgumentError(f"controller has {name!r}; expected some of {', '.join(accepted)}")
        try:
            setattr(options, name, value)
        except TypeError as error:
            raise BadArgumentError(f"controller[{name!r}] is {value!r}; expected a number") from error
    return options


def _machine(overlap_if: str, machine: Any) -> MachineProfile | None:
    if machine is None and overlap_if == "predicted":
        raise BadArgumentError("machine is None; overlap_if 'predicted' needs a machine profile")
    if machine is not None and overlap_if != "predicted":
        raise BadArgumentError(f"machine is given, but overlap_if is {overlap_if!r}; expected 'predicted' with it")
    return None if machine is None else profile_of(machine)


class MoeLayer:
    """One layer on the ranks of ``comm``, made once and called often. Making it is collective.

    capacity: rows that an expert takes at most, of all ranks together; 0: nothing is dropped.
    On a GPU (``comm.device``) all arrays are there, in float16 or bfloat16, and calls are put into a stream.
    transport: "put" (ranks that address each other's memory), "collective", or "auto": puts between in-process ranks,
    on GPUs always "collective". padding: "ragged", "shared" or "paper";
    order: "owner-major" or "expert-major". tile: (rows, columns) or None.
    segment_bands: tile rows of a segment that is put. consumers: streams that put segments, 1 to 16; on a GPU its SMs
    that do; None: 1, on a GPU 16.
    collective_groups: all-to-alls of the results with transport "collective".
    adapt: change consumers, compute threads and segment_bands between calls, as ``report["adaptation"]`` tells; the
    result keeps its bits with padding "ragged". controller: bounds and thresholds for that, by the names of
    MoeControllerOptions (moe_controller.h): {"max_consumers": 8, "patience": 3}.
    overlap_if: which calls with method "auto" are overlapped: "always"; where the first eight calls, which go both ways
    in turn, show that it is faster: "measured"; where the simulator says so for ``machine``: "predicted" (a
    MachineProfile, a dict of one, a file, or the name of one that ships). ``report["method"]`` and ``["choice"]`` tell.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        hidden: int,
        intermediate: int,
        num_experts: int,
        dtype: Any = "float32",
        gated: bool = True,
        activation: str | None = "silu",
        capacity: int = 0,
        transport: str = "auto",
        padding: str = "ragged",
        order: str = "owner-major",
        tile: Any = None,
        segment_bands: int = 2,
        consumers: int | None = None,
        collective_groups: int = 4,
        adapt: bool = False,
        controller: Mapping[str, float] | None = None,
        overlap_if: str = "always",
        machine: Any = None,
    ) -> None:
        require_communicator(comm)
        self.comm = comm
        self.hidden, self.intermediate, self.num_experts = int(hidden), int(intermediate), int(num_experts)
        self.gated = bool(gated)
        self._dtype = _arrays.dtype_name(dtype)
        options = _core.MoeLayerOptions()
        options.hidden, options.intermediate = self.hidden, self.intermediate
        options.num_experts, options.dtype = self.num_experts, self._dtype
        options.gated, options.activation = self.gated, activation or "none"
        options.capacity, options.padding, options.order = int(capacity), padding, order
        if transport == "auto":
            transport = "put" if comm.name == "in-process" else "collective"
        options.transport = transport
        size = tile_list(tile)
        if size:
            options.tile_m, options.tile_n = size[:2]
        options.segment_bands = count(segment_bands, "segment_bands")
        if consumers is None:
            consumers = 1 if comm.device is None else _CONSUMERS_ON_GPU
        options.consumers = count(consumers, "consumers")
        options.collective_groups = count(collective_groups, "collective_groups")
        options.adapt, options.controller = bool(adapt), _controller(controller)
        options.overlap_if = overlap_if
        profile = _machine(overlap_if, machine)
        if profile is not None:
            options.set_machine(profile._json)
        options.poison_workspace = comm._poison_workspace
        self._core = _core.make_moe_layer(comm._get_context(), options)
        #: What the last call did on this rank: phases in microseconds, rows sent, dropped and wasted, workspace,
        #: setting, what the controller decided, and how the call was carried out ("method") and why ("choice").
        self.report: dict[str, Any] = {}
        self._stream = 0  # Of the last call.

    @property
    def first_expert(self) -> int:
        return self._core.first_expert

    @property
    def local_experts(self) -> int:
        return self._core.local_experts

    @property
    def setting(self) -> dict[str, int]:
        """consumers, compute_units and segment_bands of the next call."""
        return self._core.setting

    def set_adaptive(self, adapt: bool) -> None:
        """Adaptation on or off from the next call on; the setting in force stays. All ranks call it alike."""
        self._core.set_adaptive(bool(adapt))

    def plans(self) -> tuple[Plan, Plan]:
        """This rank's plans of the call before: dispatch with the first GEMM, and second GEMM with the return."""
        dispatch, combine = self._core.plans_json()
        return Plan(dispatch), Plan(combine)

    def measure_parts(self, w_up: Any, w_down: Any) -> dict[str, float]:
        """The last call's GEMMs without communication and transfers without GEMMs, in microseconds. Collective.

        To tell how much is hidden. No ``backward`` can follow it.
        """
        return self._core.measure_parts(*self._weights(w_up, w_down))

    def _view(self, array: Any, name: str, shape: list[int], meaning: str, **options: Any) -> _core.Array:
        seen = _arrays.view(array, name, ndim=len(shape), device=self.comm._device, **options)
        _arrays.require_shape(seen, shape, meaning)
        if seen.dtype != self._dtype:
            expected = _arrays.LONG_NAMES[self._dtype]
            raise ArgumentTypeError(f"{name} has type {_arrays.LONG_NAMES[seen.dtype]}; expected {expected}")
        return seen

    def _weights(self, w_up: Any, w_down: Any) -> tuple[_core.Array, _core.Array]:
        rows = 2 * self.intermediate if self.gated else self.intermediate
        up = [self.local_experts, rows, self.hidden]
        down = [self.local_experts, self.hidden, self.intermediate]
        return (
            self._view(w_up, "w_up", up, "[local experts, 2 I, H]" if self.gated else "[local experts, I, H]"),
            self._view(w_down, "w_down", down, "[local experts, H, I]"),
        )

    def __call__(
        self,
        x: Any,
        routing: Routing,
        w_up: Any,
        w_down: Any,
        *,
        out: Any = None,
        method: str = "auto",
        stream: Any = None,
        timeline: _core.Timeline | None = None,
    ) -> Any:
        """x, out: [tokens, H]. w_up: [local experts, 2 I, H], with gate: its rows first, then up's; without: I rows.

        w_down: [local experts, H, I]; both C-contiguous. stream: on a GPU, as the operators have it. Collective.
        """
        how = carried_out(method)
        handle = stream_of(stream, x, self.comm._device)
        return self._run(*self._prepare(x, routing, w_up, w_down, out), how=how, stream=handle, timeline=timeline)

    def _prepare(self, x: Any, routing: Routing, w_up: Any, w_down: Any, out: Any) -> tuple[Any, ...]:
        shape = [routing.tokens, self.hidden]
        x_view = self._view(x, "x", shape, "[tokens, H]")
        up, down = self._weights(w_up, w_down)
        result = _arrays.empty_like(x, shape, self.comm._device) if out is None else out
        out_view = self._view(result, "out", shape, "[tokens, H]", writable=True)
        _arrays.require_dense_rows(out_view)
        if not x_view.has_dense_rows and out_view.overlaps(x_view):
            raise BadArgumentError(f"{out_view!r} overlaps {x_view!r}; they must lie apart")
        # The arrays travel along, so that they live as long as their views.
        return (x, w_up, w_down, result), (x_view, routing, up, down, out_view), out is None

    def _run(
        self,
        arrays: tuple[Any, ...],
        views: tuple[Any, ...],
        is_new: bool,
        *,
        how: str,
        stream: int,
        timeline: _core.Timeline | None,
    ) -> Any:
        x, _, _, result = arrays
        x_view, routed, up, down, out_view = views
        self.report = self._core.forward(x_view, routed, up, down, out_view, how, stream, timeline)
        self._stream = stream
        self._hold(*arrays)
        return _arrays.like_framework(result, x) if is_new else result

    def _hold(self, *arrays: Any) -> None:
        """On a GPU, where a call has been put into the stream, no more."""
        if self.comm._device != HOST:
            hold((array for array in arrays if array is not None), self._stream, self.comm._device)

    def backward(
        self,
        out_gradient: Any,
        w_up: Any,
        w_down: Any,
        *,
        x_gradient: Any = None,
        weights_gradient: Any = None,
        w_up_gradient: Any = None,
        w_down_gradient: Any = None,
        method: str = "auto",
    ) -> Any:
        """Gradients of the call before by its output's, [tokens, H]; returns that of x. Collective.

        weights_gradient [tokens, top_k], w_up_gradient and w_down_gradient (as w_up and w_down), where given, are
        written; they are float32. On a GPU all is put into the stream of that call.
        """
        how = carried_out(method)
        device = self.comm._device
        gradient = _arrays.view(out_gradient, "out_gradient", ndim=2, device=device)
        shape = list(gradient.shape)
        self._view(out_gradient, "out_gradient", [shape[0], self.hidden], "[tokens, H]")
        up, down = self._weights(w_up, w_down)
        result = _arrays.empty_like(out_gradient, shape, device) if x_gradient is None else x_gradient
        into = self._view(result, "x_gradient", shape, "[tokens, H]", writable=True)
        _arrays.require_dense_rows(into)
        written = [
            _arrays.optional_view(array, name, ndim=ndim, writable=True, device=device)
            for array, name, ndim in (
                (weights_gradient, "weights_gradient", 2),
                (w_up_gradient, "w_up_gradient", 3),
                (w_down_gradient, "w_down_gradient", 3),
            )
        ]
        if written[0] is not None and written[0].shape[0] != shape[0]:
            raise BadArgumentError(f"{written[0]!r} has not the {shape[0]} tokens of out_gradient")
        _arrays.require_shape(written[1], list(up.shape), "w_up's")
        _arrays.require_shape(written[2], list(down.shape), "w_down's")
        self.report = self._core.backward(gradient, up, down, into, written[0], written[1], written[2], how)
        self._hold(out_gradient, w_up, w_down, result, weights_gradient, w_up_gradient, w_down_gradient)
        return _arrays.like_framework(result, out_gradient) if x_gradient is None else x_gradient


def _concatenated(w_gate: Any, w_up: Any) -> Any:
    """[local experts, 2 I, H]."""
    if framework_of(w_up) == "torch":
        import torch

        return torch.cat([w_gate, w_up], 1)
    if framework_of(w_up) == "cupy":
        return sys.modules["cupy"].concatenate([w_gate, w_up], axis=1)
    import numpy as np

    return np.concatenate([np.asarray(w_gate), np.asarray(w_up)], axis=1)


def moe_layer(
    x: Any,
    router: Any,
    w_up: Any,
    w_gate: Any,
    w_down: Any,
    *,
    comm: Communicator,
    top_k: int | None = None,
    num_experts: int | None = None,
    gate: str = "softmax",
    renormalise: bool = False,
    activation: str | None = "silu",
    capacity: int = 0,
    transport: str = "auto",
    overlap_if: str = "always",
    machine: Any = None,
    method: str = "auto",
    tile: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """One call of ``MoeLayer``: x [tokens, H] gives [tokens, H].

    router: logits [tokens, E], with top_k, gate and renormalise as in ``route``; or (ids, weights), each
    [tokens, top_k], with num_experts (None: as many local experts on each rank).
    w_up, w_gate: [local experts, I, H]; w_down: [local experts, H, I]. w_gate None: without gate. With it the two are
    put together, which copies them: ``MoeLayer`` takes them together. overlap_if, machine: see there; calls of one
    shape share their trials. stream: as the operators have it; ids, weights and logits on a GPU are copied to the host.

    Collective; the ranks compare their calls first, so that an error on one rank is an error on all.
    """
    require_communicator(comm)

    def check() -> tuple[tuple[Routing, dict[str, Any], Any, str, int], str, str]:
        how = carried_out(method)
        handle = stream_of(stream, x, comm._device)
        x_view = _arrays.view(x, "x", ndim=2, device=comm._device)
        up = _arrays.view(w_up, "w_up", ndim=3, device=comm._device)
        experts, intermediate, hidden = up.shape
        if isinstance(router, tuple):
            total = num_experts if num_experts is not None else experts * comm.size
            if len(router) != 2:
                raise BadArgumentError(
                    f"router is a tuple of {len(router)}; expected (ids, weights), or an array of logits"
                )
            ids, weights_of_ids = router
            routed = routing(ids, weights_of_ids, total)
        else:
            if top_k is None:
                raise BadArgumentError("router is an array of logits; expected top_k with it")
            routed = route(router, top_k, gate=gate, renormalise=renormalise)
        weights = w_up
        if w_gate is not None:
            gate_view = _arrays.view(w_gate, "w_gate", ndim=3, device=comm._device)
            _arrays.require_shape(gate_view, up.shape, "w_up's")
            weights = _concatenated(w_gate, w_up)
        options = {
            "hidden": hidden,
            "intermediate": intermediate,
            "num_experts": routed.num_experts,
            "dtype": x_view.dtype,
            "gated": w_gate is not None,
            "activation": activation,
            "capacity": capacity,
            "transport": transport,
            "tile": tuple(tile_list(tile)) or None,
            "overlap_if": overlap_if,
        }
        profile = _machine(overlap_if, machine)
        common = f"moe-layer {options}"
        if profile is not None:  # Two of one name may differ.
            common += f" machine={profile.name} {hashlib.sha256(profile._json.encode()).hexdigest()[:16]}"
        options["machine"] = profile
        return (routed, options, weights, common, handle), f"{common} top_k={routed.top_k} method={how}", ""

    (routed, options, weights, key, handle), _ = agree(comm, "moe-layer", check)
    layer: MoeLayer = operator_for(comm, key, lambda: MoeLayer(comm, **options))
    call, _ = agree(comm, "moe-layer", lambda: (layer._prepare(x, routed, weights, w_down, out), "", ""))
    return layer._run(*call, how=carried_out(method), stream=handle, timeline=None)
