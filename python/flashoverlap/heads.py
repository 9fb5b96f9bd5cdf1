"""GEMMs around attention whose ranks hold tokens before it and heads within it (Ulysses; arXiv 2604.24013, UP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from ._options import SLICED_METHODS, Tile, carried_out, share, slice_sizes
from .ranks import Communicator

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _size(sizes: Sequence[int], total: int, comm: Communicator) -> int:
    """Of this rank's slice."""
    return sizes[comm.rank] if sizes else share(total, comm.size, comm.rank)


@dataclass
class _Call:
    """A call of one of the functions here."""

    operation: str
    a: Any
    b: Any
    comm: Communicator
    columns: Sequence[int] | None
    rows: Sequence[int] | None
    method: str
    tile: Tile
    out: Any
    stream: Any
    epilogue: Epilogue

    def check(self) -> tuple[tuple[Shape, Inputs], str, str]:
        how = carried_out(self.method)
        n, k = _arrays.view(self.b, "b", ndim=2, device=self.comm._device).shape
        sizes = slice_sizes(self.columns, "columns", self.comm.size)
        before = self.operation == "gemm-all-to-all-heads"
        mine = _size(sizes, n if before else k, self.comm)
        own = {"columns": mine} if before else {"inner": mine}
        inputs = view_inputs(self.a, self.b, self.epilogue, self.stream, self.comm, **own)
        m = inputs.a.shape[0]
        rows = slice_sizes(self.rows, "rows", self.comm.size)
        shape = shape_of(self.operation, m, n, k, inputs.a.dtype, tile=self.tile, row_sizes=rows, column_sizes=sizes)
        return (shape, inputs), f"{shape} method={how}", str(m) if before else ""

    def run(self) -> Any:
        require_communicator(self.comm)
        (shape, inputs), counts = agree(self.comm, self.operation, self.check)
        output_rows = _size(shape.row_sizes, shape.m, self.comm)
        if self.operation == "gemm-all-to-all-heads":  # Only now it is known how many rows there are.
            rows = tuple(int(count) for count in counts)
            output_rows = sum(rows)
            shape = replace(shape, m=output_rows, row_sizes=rows)

        def prepare() -> tuple[Outputs, str, str]:
            return view_outputs(self.a, inputs, self.out, self.epilogue, output_rows), "", ""

        outputs, _ = agree(self.comm, self.operation, prepare)
        operator: GemmOperator = operator_for(self.comm, shape, lambda: GemmOperator(self.comm, shape))
        run(operator._core, inputs, outputs, self.epilogue, carried_out(self.method))
        return _arrays.like_framework(outputs.out, self.a) if self.out is None else self.out


class _HeadGemm(GemmOperator):
    """rows: tokens of each rank; they sum to m. columns: of each rank's heads."""

    _OPERATION = ""
    _METHODS = SLICED_METHODS

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
        parts: int = 0,
        send_channels: int = 0,
        num_slices: int = 0,
        tile: Tile = None,
    ) -> None:
        require_communicator(comm)
        shape = shape_of(
            self._OPERATION,
            m,
            n,
            k,
            dtype,
            tile=tile,
            row_sizes=slice_sizes(rows, "rows", comm.size),
            column_sizes=slice_sizes(columns, "columns", comm.size),
            parts=parts,
            send_channels=send_channels,
            num_slices=num_slices,
        )
        super().__init__(comm, shape)


class GemmAllToAllHeads(_HeadGemm):
    """``gemm_all_to_all_heads`` for repeated calls of one shape. Making it is collective.

    m: tokens of all ranks together. rows: tokens of each rank; they sum to m. columns: of b, for each rank's heads;
    they sum to n. None: rank r of W has [r·m/W, (r+1)·m/W), rounded down. parts: strips that travel; send_channels:
    slices that a rank may be sending at a time; 0: chosen.
    num_slices: makes the slicing baseline ready too, for calls with method="sliced": one all-to-all for each piece of
    all ranks' rows, with the rows of residual and out in the order of ``sliced_rows()``.
    """

    _OPERATION = "gemm-all-to-all-heads"

    def sliced_rows(self) -> list[int]:
        """With method="sliced": for each row of the output its token."""
        return self._sliced_rows()

    @property
    def rows_from(self) -> list[int]:
        """Rows that come from each rank; the output has them in this order."""
        return self._core.rows_from

    def _columns(self) -> int:
        return _size(self._shape.column_sizes, self._shape.n, self.comm)

    def _a_shape(self) -> list[int]:
        return [_size(self._shape.row_sizes, self._shape.m, self.comm), self._shape.k]


class AllToAllGemm(_HeadGemm):
    """``all_to_all_gemm`` for repeated calls of one shape. Making it is collective.

    m: tokens of all ranks together. rows: tokens of each rank; they sum to m. columns: of each rank's heads; they sum
    to k. None: rank r of W has [r·m/W, (r+1)·m/W), rounded down. parts: strips that travel; send_channels: slices
    that a rank may be sending at a time; 0: chosen.
    num_slices: makes the slicing baseline ready too, for calls with method="sliced": one all-to-all for each piece of
    all ranks' columns. What is in ``a`` then lies in such pieces, one dense [m, columns of the piece] after the other:
    piece i of S of c columns has [i·c/S, (i+1)·c/S), rounded down.
    """

    _OPERATION = "all-to-all-gemm"

    def _inner(self) -> int:
        return _size(self._shape.column_sizes, self._shape.k, self.comm)

    def _a_shape(self) -> list[int]:
        return [self._shape.m, self._inner()]


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
    call = _Call("gemm-all-to-all-heads", a, b, comm, columns, None, method, tile, out, stream, Epilogue.of(epilogue))
    return call.run()


def all_to_all_gemm(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    rows: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    method: str = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """out [rows of this rank, n] = epilogue(those rows of [a_0, a_1, …] [m, k] · b [n, k]ᵀ); a_r is [m, columns of r].

    The output projection behind Ulysses attention: a rank has its heads' columns of all tokens and the whole weight,
    and gets its tokens' rows. The GEMM begins with this rank's columns and takes the others' as they arrive
    (arXiv 2604.24013, UP). Between the rows of a there must be no gaps.
    rows: tokens of each rank; they sum to m. columns: of each rank's a; they sum to k. None: rank r of W has
    [r·m/W, (r+1)·m/W), rounded down. bias, rms_norm_weight: [n]. residual, residual_out, out: [rows of this rank, n].
    method: "overlap" ("auto") or "serial". Everything else: see ``gemm_all_reduce``.
    """
    call = _Call("all-to-all-gemm", a, b, comm, columns, rows, method, tile, out, stream, Epilogue.of(epilogue))
    return call.run()
