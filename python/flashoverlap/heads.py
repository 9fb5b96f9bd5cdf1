"""GEMMs around attention whose ranks hold tokens before it and heads within it (Ulysses; arXiv 2604.24013, UP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import _arrays
from ._agreement import agree, operator_for, require_communicator
from ._gemm import (
    Epilogue,
    EpilogueArguments,
    GemmOperator,
    Inputs,
    Outputs,
    Shape,
    run,
    shape_of,
    view_inputs,
    view_outputs,
)
from ._options import Tile, carried_out, share, slice_sizes
from .ranks import Communicator

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _size(sizes: Sequence[int], total: int, comm: Communicator) -> int:
    """Of this rank's slice."""
    return sizes[comm.rank] if sizes else share(total, comm.size, comm.rank)


class GemmAllToAllHeads(GemmOperator):
    """``gemm_all_to_all_heads`` for repeated calls of one shape. Making it is collective.

    m: tokens of all ranks together. rows: tokens of each rank; they sum to m. columns: of b, for each rank's heads;
    they sum to n. None: rank r of W has [r·m/W, (r+1)·m/W), rounded down.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        m: int,
        n: int,
        k: int,
        dtype: Any = "float32",
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
        tile: Tile = None,
    ) -> None:
        require_communicator(comm)
        shape = shape_of(
            "gemm-all-to-all-heads",
            m,
            n,
            k,
            dtype,
            tile=tile,
            row_sizes=slice_sizes(rows, "rows", comm.size),
            column_sizes=slice_sizes(columns, "columns", comm.size),
        )
        super().__init__(comm, shape)

    @property
    def rows_from(self) -> list[int]:
        """Rows that come from each rank; the output has them in this order."""
        return self._core.rows_from

    def _columns(self) -> int:
        return _size(self._shape.column_sizes, self._shape.n, self.comm)

    def _a_shape(self) -> list[int]:
        return [_size(self._shape.row_sizes, self._shape.m, self.comm), self._shape.k]


def gemm_all_to_all_heads(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    columns: Sequence[int] | None = None,
    method: str = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """out [m, columns of this rank] = epilogue(those columns of all ranks' a_r [m_r, k] · b [n, k]ᵀ, rank after rank).

    The projection before Ulysses attention: a rank has its tokens and the whole weight, and gets its heads' columns of
    all tokens. Other ranks' columns are computed first and sent when complete (arXiv 2604.24013, UP).
    m_r may differ between ranks and be 0. columns: rows of b that belong to each rank's heads, in order; they sum to n;
    None: rank r of W has [r·n/W, (r+1)·n/W), rounded down, so give them where heads do not divide evenly.
    bias, rms_norm_weight: [columns of this rank]; the norm is over these columns alone. residual, residual_out, out:
    [m, columns of this rank]. method: "overlap" ("auto") or "serial". Everything else: see ``gemm_all_reduce``.
    """
    operation = "gemm-all-to-all-heads"
    applied = Epilogue.of(epilogue)
    require_communicator(comm)

    def check() -> tuple[tuple[Shape, Inputs], str, str]:
        how = carried_out(method)
        n = _arrays.view(b, "b", ndim=2, device=comm._device).shape[0]
        sizes = slice_sizes(columns, "columns", comm.size)
        inputs = view_inputs(a, b, applied, stream, comm, _size(sizes, n, comm))
        m, k = inputs.a.shape
        shape = shape_of(operation, m, n, k, inputs.a.dtype, tile=tile, column_sizes=sizes)
        return (shape, inputs), f"{shape} method={how}", str(m)

    (shape, inputs), counts = agree(comm, operation, check)
    rows = tuple(int(count) for count in counts)
    shape = replace(shape, m=sum(rows), row_sizes=rows)

    def prepare() -> tuple[Outputs, str, str]:
        return view_outputs(a, inputs, out, applied, shape.m), "", ""

    outputs, _ = agree(comm, operation, prepare)
    operator: GemmOperator = operator_for(comm, shape, lambda: GemmOperator(comm, shape))
    run(operator._core, inputs, outputs, applied, carried_out(method))
    return _arrays.like_framework(outputs.out, a) if out is None else out
