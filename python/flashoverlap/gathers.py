"""GEMMs of a matrix that is spread over the ranks: its slices arrive while the GEMM runs, this rank's own first
(arXiv 2604.24013)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import _arrays, _core
from ._agreement import agree, operator_for, require_communicator
from ._devices import HOST, stream_of
from ._gemm import (
    Epilogue,
    EpilogueArguments,
    GemmOperator,
    Inputs,
    Outputs,
    Shape,
    SlicedGemm,
    run,
    shape_of,
    view_inputs,
    view_matrices,
    view_outputs,
)
from ._options import Tile, carried_out, share
from .errors import BadArgumentError
from .ranks import Communicator

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _GatheringGemm(SlicedGemm):
    """An operator one of whose matrices is spread over the ranks by rows."""

    _SPREAD = "a"

    def _own_rows(self) -> int:
        sizes = self._shape.row_sizes
        return sizes[self.comm.rank] if sizes else share(self._total(), self.comm.size, self.comm.rank)

    def _total(self) -> int:
        return self._shape.m if self._SPREAD == "a" else self._shape.n

    def sliced_rows(self) -> list[int]:
        """With method="sliced": for each row of ``gathered`` its row in the whole matrix."""
        return self._sliced_rows()

    def __call__(
        self, a: Any, b: Any, *, method: str = "auto", gathered: Any = None, stream: Any = None, **options: Any
    ) -> Any:
        """The spread matrix is given as this rank's slice. gathered: C-contiguous, gets all slices of it."""
        how = carried_out(method, self._METHODS)
        mine = a if self._SPREAD == "a" else b
        whole_shape = [self._total(), self._shape.k]
        device = self.comm._device
        handle = stream_of(stream, mine, device)
        whole = _arrays.empty_like(mine, whole_shape, device) if gathered is None else gathered
        slice_view = _arrays.view(mine, self._SPREAD, ndim=2, device=device)
        _arrays.require_shape(slice_view, [self._own_rows(), self._shape.k], "[rows of this rank, k]")
        whole_view = _arrays.view(whole, "gathered", ndim=2, writable=True, device=device)
        _arrays.require_dtype(whole_view, slice_view)
        _arrays.require_shape(whole_view, whole_shape, "[all rows, k]")
        self._core.place_slice(slice_view, whole_view, how, handle)
        matrices = (whole, b) if self._SPREAD == "a" else (a, whole)
        out = super().__call__(*matrices, method=how, stream=stream if device == HOST else handle, **options)
        return _arrays.like_framework(out, a) if options.get("out") is None else out


class AllGatherGemm(_GatheringGemm):
    """``all_gather_gemm`` for repeated calls of one shape. Making it is collective.

    rows: of each rank's slice of a; they sum to m. None: rank r of W has [r·m/W, (r+1)·m/W), rounded down.
    parts: transfers of each slice, as far as it has so many tiles; send_channels: slices that a rank may be sending
    at a time; 0: chosen.
    num_slices: makes the slicing baseline ready too, for calls with method="sliced": one all-gather for each piece of
    all ranks' slices, with the rows of gathered, residual and out in the order of ``sliced_rows()``.
    """

    _OPERATION = "all-gather-gemm"


class ShardedWeightGemm(_GatheringGemm):
    """``sharded_weight_gemm`` for repeated calls of one shape. Making it is collective.

    rows: of each rank's slice of b; they sum to n. None: rank r of W has [r·n/W, (r+1)·n/W), rounded down.
    parts: transfers of each slice, as far as it has so many tiles; send_channels: slices that a rank may be sending
    at a time; 0: chosen.
    num_slices: makes the slicing baseline ready too, for calls with method="sliced": one all-gather for each piece of
    all ranks' slices, with the rows of gathered and the columns of out, residual and bias in the order of
    ``sliced_rows()``.
    """

    _OPERATION = "sharded-weight-gemm"
    _SPREAD = "b"


@dataclass
class _Call:
    """A call of one of the functions here."""

    operation: str
    a: Any
    b: Any
    comm: Communicator
    gathered: Any
    method: str
    tile: Tile
    out: Any
    stream: Any
    epilogue: Epilogue

    @property
    def spreads_a(self) -> bool:
        return self.operation == "all-gather-gemm"

    def check(self) -> tuple[Shape, str, str]:
        how = carried_out(self.method)
        stream_of(self.stream, self.a, self.comm._device)
        self.epilogue.check()
        a, b = view_matrices(self.a, self.b, self.comm._device)
        m, k = a.shape
        shape = shape_of(self.operation, m, b.shape[0], k, a.dtype, tile=self.tile)
        return shape, f"{shape} method={how}", str(m if self.spreads_a else b.shape[0])

    def prepare(self, shape: Shape) -> tuple[tuple[_core.Array, _core.Array, Inputs, Outputs], str, str]:
        """The views of this rank's slice, of the whole matrix, and of the operands, of which that is one."""
        spread, name = (self.a, "a") if self.spreads_a else (self.b, "b")
        rows = shape.m if self.spreads_a else shape.n
        device = self.comm._device
        whole = _arrays.empty_like(spread, [rows, shape.k], device) if self.gathered is None else self.gathered
        slice_view = _arrays.view(spread, name, ndim=2, device=device)
        whole_view = _arrays.view(whole, "gathered", ndim=2, writable=True, device=device)
        _arrays.require_shape(whole_view, [rows, shape.k], "[m, k]" if self.spreads_a else "[n, k]")
        _arrays.require_dtype(whole_view, slice_view)
        if not whole_view.is_dense:
            raise BadArgumentError(f"{whole_view!r} has gaps; expected a C-contiguous array")
        a, b = (whole, self.b) if self.spreads_a else (self.a, whole)
        inputs = view_inputs(a, b, self.epilogue, self.stream, self.comm)
        outputs = view_outputs(self.a, inputs, self.out, self.epilogue, shape.m)
        for written in (outputs.out_view, outputs.residual_out):
            if written is not None and written.overlaps(slice_view):
                raise BadArgumentError(f"{written!r} overlaps {name}; they must lie apart")
        return (slice_view, whole_view, inputs, outputs), "", ""

    def run(self) -> Any:
        require_communicator(self.comm)
        shape, rows = agree(self.comm, self.operation, self.check)
        sizes = tuple(int(count) for count in rows)
        m, n = (sum(sizes), shape.n) if self.spreads_a else (shape.m, sum(sizes))
        shape = replace(shape, m=m, n=n, row_sizes=sizes)
        (mine, whole, inputs, outputs), _ = agree(self.comm, self.operation, lambda: self.prepare(shape))
        operator: GemmOperator = operator_for(self.comm, shape, lambda: GemmOperator(self.comm, shape))
        how = carried_out(self.method)
        operator._core.place_slice(mine, whole, how, inputs.stream)
        run(operator._core, inputs, outputs, self.epilogue, how)
        return _arrays.like_framework(outputs.out, self.a) if self.out is None else self.out


def all_gather_gemm(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    gathered: Any = None,
    method: str = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """out [m, n] = epilogue(all ranks' a_r [m_r, k], one after the other, · b [n, k]ᵀ), b this rank's own.

    A column-parallel linear layer behind sequence parallelism: slices of a arrive while the GEMM runs, this rank's own
    first (arXiv 2604.24013). m_r may differ between ranks and be 0. gathered: [m, k], C-contiguous, gets all slices.
    method: "overlap" ("auto") or "serial". Everything else: see ``gemm_all_reduce``.
    """
    call = _Call("all-gather-gemm", a, b, comm, gathered, method, tile, out, stream, Epilogue.of(epilogue))
    return call.run()


def sharded_weight_gemm(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    gathered: Any = None,
    method: str = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """out [m, n] = epilogue(a [m, k] · (all ranks' b_r [n_r, k], one after the other)ᵀ), a this rank's own.

    A linear layer whose weight is spread over data-parallel ranks, forward: rows of the weight arrive while the GEMM
    runs, this rank's own first (arXiv 2604.24013, DP). All ranks have as many samples, m. n_r may differ and be 0.
    gathered: [n, k], C-contiguous, gets the whole weight. bias, rms_norm_weight: [n], of the whole weight.
    method: "overlap" ("auto") or "serial". Everything else: see ``gemm_all_reduce``. The weight's gradient:
    ``gradient_reduce_scatter``.
    """
    call = _Call("sharded-weight-gemm", a, b, comm, gathered, method, tile, out, stream, Epilogue.of(epilogue))
    return call.run()
