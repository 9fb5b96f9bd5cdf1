"""A call on paper: which operator, its shape, how it is cut. Checked; nothing of it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _core
from ._options import slice_sizes
from .errors import BadArgumentError


def operation_name(name: str) -> str:
    return str(name).replace("_", "-")


GROUPS = ("gemm-all-reduce", "gemm-reduce-scatter", "gemm-all-to-all")
SLICES = (
    "all-gather-gemm",
    "sharded-weight-gemm",
    "gradient-reduce-scatter",
    "gemm-all-to-all-heads",
    "all-to-all-gemm",
)
_HEADS = ("gemm-all-to-all-heads", "all-to-all-gemm")
_OPERATIONS = (*GROUPS, *SLICES)


def _methods_of(operation: str, whole: bool) -> list[str]:
    """whole: also the baselines, and without a choice that only operators can make."""
    methods = ["auto", "overlap"]
    if operation == "gemm-reduce-scatter":
        methods += ["signal", "tail-free"]
    if whole:
        methods.append("serial")
        if operation in ("gemm-reduce-scatter", *SLICES):
            methods.append("sliced")
    return methods


@dataclass(frozen=True)
class _Slices:
    """How the ranks' slices are cut, checked."""

    rows: str  # Ownership, of a reduce-scatter.
    row_sizes: tuple[int, ...]
    column_sizes: tuple[int, ...]
    world_size: int

    @staticmethod
    def of(operation: str, rows: Any, columns: Any, world_size: int, ranks: int) -> _Slices:
        if columns is not None and operation not in _HEADS:
            raise BadArgumentError(f"columns are for {' and '.join(_HEADS)}; {operation} has none")
        ownership = isinstance(rows, str)
        if ownership == (operation in SLICES) and rows is not None:
            expected = "a number for each rank" if ownership else "'contiguous' or 'block-cyclic'"
            raise BadArgumentError(f"rows is {rows!r}; expected {expected} for {operation}")
        sizes = None if ownership else rows
        ranks = world_size or ranks or len(sizes or columns or (0, 0))
        return _Slices(
            rows if ownership else "contiguous",
            slice_sizes(sizes, "rows", ranks),
            slice_sizes(columns, "columns", ranks),
            ranks,
        )


def problem_of(
    operation: str,
    *,
    n: int,
    k: int,
    m: int = 0,
    world_size: int = 0,
    dtype: Any = "float32",
    method: str = "auto",
    rows: str | Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    parts: int = 0,
    send_channels: int = 0,
    num_slices: int = 0,
    destinations: Sequence[Sequence[int]] | None = None,
    tile: Any = None,
    partition: Any = "auto",
    units: int = 0,
    whole: bool = False,
) -> _core.Problem:
    from ._gemm import shape_of  # which imports planning

    operation = operation_name(operation)
    if operation not in _OPERATIONS:
        raise BadArgumentError(f"operation is {operation!r}; expected one of {', '.join(_OPERATIONS)}")
    if method not in _methods_of(operation, whole):
        raise BadArgumentError(f"method is {method!r}; expected one of {', '.join(_methods_of(operation, whole))}")
    if (operation == "gemm-all-to-all") != (destinations is not None):
        raise BadArgumentError("destinations: one list per rank for gemm-all-to-all, and for nothing else")
    if operation in SLICES and not isinstance(partition, str):
        raise BadArgumentError(f"partition is {partition!r}, but {operation} has slices in its place; expected 'auto'")
    lists = [[int(rank) for rank in row] for row in destinations or []]
    if world_size < 0 or units < 0:
        raise BadArgumentError(f"world_size is {world_size} and units is {units}; expected numbers >= 0 (0: chosen)")
    slices = _Slices.of(operation, rows, columns, world_size, len(lists))
    shape = shape_of(
        operation,
        m,
        n,
        k,
        dtype,
        tile=tile,
        partition=partition,
        rows=slices.rows,
        overlap=method,
        parts=parts,
        send_channels=send_channels,
        num_slices=num_slices,
    )
    problem = _core.Problem()
    problem.operation = operation
    problem.m, problem.n, problem.k = shape.m, shape.n, shape.k
    problem.world_size = slices.world_size
    problem.dtype, problem.rows, problem.method = shape.dtype, shape.rows, method
    problem.tile, problem.partition = list(shape.tile), list(shape.partition)
    problem.destinations = lists
    problem.set_slices(list(slices.row_sizes), list(slices.column_sizes), shape.parts, shape.send_channels)
    problem.num_slices, problem.units = shape.num_slices, int(units)
    return problem
