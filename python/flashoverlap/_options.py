"""Options of calls by their names and values, checked before anything is exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import BadArgumentError

Partition = str | Sequence[int]
Tile = Sequence[int] | None

ACTIVATIONS = ("none", "relu", "gelu", "silu")
METHODS = ("auto", "overlap", "serial")
SLICED_METHODS = (*METHODS, "sliced")  # Of classes that take num_slices.


def integers(values: Any, name: str, expected: str) -> list[int]:
    try:
        numbers = [int(value) for value in values]
        exact = all(number == value for number, value in zip(numbers, values, strict=False))
    except (TypeError, ValueError):
        exact = False
    if not exact:
        raise BadArgumentError(f"{name} is {values!r}; expected {expected}")
    return numbers


def count(value: Any, name: str, least: int = 0) -> int:
    if not hasattr(value, "__index__") or value < least:
        raise BadArgumentError(f"{name} is {value!r}; expected an integer >= {least}")
    return int(value)


def tile_list(tile: Tile) -> list[int]:
    if tile is None or (isinstance(tile, str) and tile == "auto"):
        return []
    numbers = integers(tile, "tile", "(rows, columns) or (rows, columns, swizzle)")
    if len(numbers) not in (2, 3) or any(number < 1 for number in numbers):
        raise BadArgumentError(f"tile is {tile!r}; expected (rows, columns) or (rows, columns, swizzle), each >= 1")
    return numbers


def partition_list(partition: Partition) -> list[int]:
    if isinstance(partition, str):
        if partition != "auto":
            raise BadArgumentError(f"partition is {partition!r}; expected 'auto' or the waves of each group")
        return []
    numbers = integers(partition, "partition", "'auto' or the waves of each group")
    if any(number < 1 for number in numbers):
        raise BadArgumentError(f"partition is {partition!r}; expected 'auto' or positive numbers of waves")
    return numbers


def slice_sizes(sizes: Sequence[int] | None, name: str, ranks: int) -> tuple[int, ...]:
    """Of each rank's slice; none: nearly equal ones."""
    if sizes is None:
        return ()
    numbers = integers(sizes, name, "one number for each rank")
    if len(numbers) != ranks or any(number < 0 for number in numbers):
        raise BadArgumentError(f"{name} is {sizes!r}; expected a number >= 0 for each of the {ranks} ranks")
    return tuple(numbers)


def share(total: int, parts: int, index: int) -> int:
    """Rank ``index``'s of nearly equal slices."""
    return (index + 1) * total // parts - index * total // parts


def carried_out(method: str, accepted: Sequence[str] = METHODS) -> str:
    """How an operator carries a call out: "serial", "sliced", or the way that it was made with: "overlap"."""
    if method not in accepted:
        raise BadArgumentError(f"method is {method!r}; expected one of {', '.join(accepted)}")
    return method if method in ("serial", "sliced") else "overlap"
