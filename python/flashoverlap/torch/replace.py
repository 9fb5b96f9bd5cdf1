"""Splits the linear layers of a model over the ranks, in place."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from ..errors import BadArgumentError
from ..ranks import Communicator
from .layers import ColumnParallelLinear, RowParallelLinear

#: Of Llama, Mistral, Qwen and others with their names. Attention then sees heads / W heads on each rank.
LLAMA_PLAN: dict[str, str] = {
    "*q_proj": "column",
    "*k_proj": "column",
    "*v_proj": "column",
    "*o_proj": "row",
    "*gate_proj": "column",
    "*up_proj": "column",
    "*down_proj": "row",
}

_CLASSES = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def replace_linear_layers(
    model: nn.Module,
    plan: Mapping[str, str] = LLAMA_PLAN,
    *,
    comm: Communicator,
    sequence_parallel: bool = False,
    method: str = "auto",
) -> list[str]:
    """Puts this rank's part in the place of each nn.Linear whose name matches ``plan``; returns their names.

    plan: pattern of the module's dotted name (as in fnmatch; the first that matches counts) to "column" or "row".
    Raises BadArgumentError, before anything is changed, when a pattern matches nothing, names another kind, or a
    layer cannot be split evenly.
    """
    found = _matches(model, plan)
    layers = {
        name: _CLASSES[kind].from_linear(linear, comm, sequence_parallel=sequence_parallel, method=method)
        for name, (linear, kind) in found.items()
    }
    for name, layer in layers.items():
        parent_name, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent_name), own_name, layer)
    return list(layers)


def _matches(model: nn.Module, plan: Mapping[str, str]) -> dict[str, tuple[nn.Linear, str]]:
    found: dict[str, tuple[nn.Linear, str]] = {}
    used = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        for pattern, kind in plan.items():
            if fnmatch.fnmatch(name, pattern):
                found[name] = (module, kind)
                used.add(pattern)
                break
    for pattern, kind in plan.items():
        if kind not in _CLASSES:
            raise BadArgumentError(f"plan[{pattern!r}] is {kind!r}; expected 'column' or 'row'")
        if pattern not in used:
            raise BadArgumentError(f"plan[{pattern!r}] matches no nn.Linear of the model")
    return found
