"""GEMMs whose result travels while it is computed.

All compute D_r = A_r · B_rᵀ on each rank r, with A [m, k] and B [n, k] (a linear layer's weight as frameworks store
it), and then exchange D. Elements are float32, float16 or bfloat16; sums are taken in float32, over ranks in rank
order, so results have the same bits on every call and with every method.

Inputs may be strided, transposed, broadcast or reversed: where rows are not dense the call works on a packed copy.
``out`` and ``residual_out`` must have dense rows and lie apart from the inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _arrays, _core
from ._agreement import agree, operator_for, require_communicator
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
    view_outputs,
)
from ._options import METHODS, SLICED_METHODS, Partition, Tile, carried_out, integers, share, slice_sizes
from .errors import BadArgumentError
from .ranks import Communicator

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SCATTER_METHODS = (*METHODS, "signal", "tail-free")


def _methods_of(operation: str) -> Sequence[str]:
    return _SCATTER_METHODS if operation == "gemm-reduce-scatter" else METHODS


def _overlap_of(operation: str, method: str) -> str:
    """How it overlaps where there is a choice: signal, tail-free or auto."""
    if operation != "gemm-reduce-scatter":
        return "signal"
    return method if method in ("signal", "tail-free") else "auto"


class GemmAllReduce(GemmOperator):
    """``gemm_all_reduce`` for repeated calls of one shape. Making it is collective: the ranks agree on the plan."""

    def __init__(
        self,
        comm: Communicator,
        *,
        m: int,
        n: int,
        k: int,
        dtype: Any = "float32",
        tile: Tile = None,
        partition: Partition = "auto",
    ) -> None:
        super().__init__(comm, shape_of("gemm-all-reduce", m, n, k, dtype, tile=tile, partition=partition))


class GemmReduceScatter(GemmOperator):
    """``gemm_reduce_scatter`` for repeated calls of one shape. Making it is collective; ``method`` is chosen here.

    num_slices: makes the slicing baseline ready too, for calls with method="sliced": so many groups of equally many
    waves. It has contiguous rows.
    """

    _METHODS = SLICED_METHODS

    def __init__(
        self,
        comm: Communicator,
        *,
        m: int,
        n: int,
        k: int,
        dtype: Any = "float32",
        rows: str = "contiguous",
        method: str = "auto",
        tile: Tile = None,
        partition: Partition = "auto",
        num_slices: int = 0,
    ) -> None:
        operation = "gemm-reduce-scatter"
        carried_out(method, _SCATTER_METHODS)
        if num_slices and rows == "block-cyclic":
            raise BadArgumentError(f"num_slices is {num_slices}, which needs rows='contiguous'; expected 0")
        shape = shape_of(
            operation,
            m,
            n,
            k,
            dtype,
            tile=tile,
            partition=partition,
            rows=rows,
            overlap=_overlap_of(operation, method),
            num_slices=num_slices,
        )
        super().__init__(comm, shape)

    def owned_rows(self) -> list[int]:
        """Global row of each output row of this rank, ascending."""
        tile_m = self.plan().to_dict()["grid"]["tile_m"]
        return _core.owned_rows(self._shape.m, tile_m, self.comm.size, self.comm.rank, self._shape.rows)


class GradientReduceScatter(SlicedGemm):
    """``gradient_reduce_scatter`` for repeated calls of one shape. Making it is collective.

    rows: of each rank's slice of the gradient; they sum to m. None: rank r of W has [r·m/W, (r+1)·m/W), rounded down.
    parts: transfers of each slice, as far as it has so many tiles; send_channels: slices that a rank may be sending
    at a time; 0: chosen.
    num_slices: makes the slicing baseline ready too, for calls with method="sliced".
    """

    _OPERATION = "gradient-reduce-scatter"


class GemmAllToAll(GemmOperator):
    """``gemm_all_to_all`` for repeated calls of one shape and routing. Making it is collective."""

    def __init__(
        self,
        comm: Communicator,
        destinations: Any,
        *,
        n: int,
        k: int,
        dtype: Any = "float32",
        tile: Tile = None,
        partition: Partition = "auto",
    ) -> None:
        require_communicator(comm)
        ranks = _destination_list(destinations, comm.size)
        super().__init__(
            comm, shape_of("gemm-all-to-all", len(ranks), n, k, dtype, tile=tile, partition=partition), ranks
        )

    @property
    def rows_from(self) -> list[int]:
        """Rows that come from each rank; the output has them in this order."""
        return self._core.rows_from


def _destination_list(destinations: Any, size: int) -> list[int]:
    values = destinations.tolist() if hasattr(destinations, "tolist") else destinations
    ranks = integers(values, "destinations", "one rank for each row of a")
    for row, rank in enumerate(ranks):
        if not 0 <= rank < size:
            raise BadArgumentError(f"destinations[{row}] is {rank}; expected a rank from 0 to {size - 1}")
    return ranks


@dataclass
class _Call:
    """A call of one of the functions here, whose operands are this rank's own."""

    comm: Communicator
    operation: str
    a: Any
    b: Any
    method: str
    tile: Tile
    out: Any
    stream: Any
    epilogue: Epilogue
    partition: Partition = "auto"
    rows: str = "contiguous"
    row_sizes: Sequence[int] | None = None
    destinations: Any = None

    def rows_known(self, shape: Shape) -> int | None:
        """Output rows, where they follow from the shape alone."""
        if self.operation == "gemm-all-reduce":
            return shape.m
        if shape.row_sizes:
            return shape.row_sizes[self.comm.rank]
        if self.operation == "gemm-all-to-all" or self.rows != "contiguous":
            return None
        return share(shape.m, self.comm.size, self.comm.rank)

    def check(self) -> tuple[tuple[Shape, Inputs, Outputs | None, list[int]], str, str]:
        how = carried_out(self.method, _methods_of(self.operation))
        inputs = view_inputs(self.a, self.b, self.epilogue, self.stream, self.comm)
        m, k = inputs.a.shape
        shape = shape_of(
            self.operation,
            m,
            inputs.b.shape[0],
            k,
            inputs.a.dtype,
            tile=self.tile,
            partition=self.partition,
            rows=self.rows,
            overlap=_overlap_of(self.operation, self.method),
            row_sizes=slice_sizes(self.row_sizes, "rows", self.comm.size),
        )
        destinations = self.check_destinations(inputs.a)
        rows = self.rows_known(shape)
        outputs = None if rows is None else self.view_outputs(inputs, rows)
        own = hashlib.sha256(repr(destinations).encode()).hexdigest() if self.destinations is not None else ""
        return (shape, inputs, outputs, destinations), f"{shape} method={how}", own

    def check_destinations(self, a: _core.Array) -> list[int]:
        if self.operation != "gemm-all-to-all":
            return []
        destinations = _destination_list(self.destinations, self.comm.size)
        if len(destinations) != a.shape[0]:
            raise BadArgumentError(
                f"destinations has {len(destinations)} entries; expected one for each of the {a.shape[0]} rows of a "
                f"{list(a.shape)}"
            )
        return destinations

    def view_outputs(self, inputs: Inputs, rows: int) -> Outputs:
        return view_outputs(self.a, inputs, self.out, self.epilogue, rows)

    def run(self) -> Any:
        require_communicator(self.comm)
        (shape, inputs, known, destinations), routing = agree(self.comm, self.operation, self.check)
        # Two all-to-alls of a rank may be alike where those of another are not.
        key = (shape, *routing)
        operator: GemmOperator = operator_for(self.comm, key, lambda: GemmOperator(self.comm, shape, destinations))
        outputs: Outputs
        if known is not None:
            outputs = known
        else:  # Only now it is known how many rows come.
            rows = operator.output_rows
            outputs, _ = agree(self.comm, self.operation, lambda: (self.view_outputs(inputs, rows), "", ""))
        run(operator._core, inputs, outputs, self.epilogue, carried_out(self.method, _methods_of(self.operation)))
        return _arrays.like_framework(outputs.out, self.a) if self.out is None else self.out


def gemm_all_reduce(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    method: str = "auto",
    partition: Partition = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """out [m, n] = epilogue(sum over ranks r of a_r [m, k] · b_r [n, k]ᵀ), on every rank: a row-parallel linear layer.

    Applied once, to the sum, in float32:
    y = activation(sum + bias); h = y + residual; out = h / sqrt(mean(h²) + rms_norm_eps) · rms_norm_weight, or h.

    bias, rms_norm_weight: [n]. activation: None, "relu", "gelu" (the exact one) or "silu". rms_norm_eps: 1e-6.
    residual: [m, n]; residual_out: [m, n], gets h; may be ``residual`` itself.
    method: "overlap" ("auto" is this), or "serial": GEMM, then one all-reduce, then the epilogue; the same bits.
    partition: waves of each group of the overlap, or "auto". tile: (rows, columns) or (rows, columns, swizzle).
    out: [m, n] where the result goes; otherwise a new array of the framework of ``a``. stream: None on the CPU.

    Collective. The ranks first compare their calls, so that an error on one rank is an error on every rank before
    anything is computed; ``GemmAllReduce`` does that once for many calls. Raises BadArgumentError (a ValueError) for
    shapes, strides, read-only or overlapping arrays and options, ArgumentTypeError (a TypeError) for element types and
    things that are no arrays, CommunicationError and TimeoutError when another rank fails.
    """
    call = _Call(comm, "gemm-all-reduce", a, b, method, tile, out, stream, Epilogue.of(epilogue), partition)
    return call.run()


def gemm_reduce_scatter(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    rows: str = "contiguous",
    method: str = "auto",
    partition: Partition = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """out [owned rows, n] = epilogue(this rank's rows of the sum over ranks r of a_r [m, k] · b_r [n, k]ᵀ).

    method: also "signal" (wave groups, arXiv 2504.19519) and "tail-free" (slices by direct transfers,
    arXiv 2604.24013). "auto", where rows are contiguous and no partition is given: the quickest of both and serial in
    simulation where ``Communicator.use_tuner`` knows the machine, otherwise "tail-free". The same bits all.
    rows: "contiguous": rank r of W owns rows [r·m/W, (r+1)·m/W), rounded down; "block-cyclic": each tile is cut into W
    slabs and rank r owns slab r of each (``GemmReduceScatter.owned_rows`` lists them).
    residual, residual_out and out: [owned rows, n]. Everything else: see ``gemm_all_reduce``.
    """
    call = _Call(comm, "gemm-reduce-scatter", a, b, method, tile, out, stream, Epilogue.of(epilogue), partition, rows)
    return call.run()


def gradient_reduce_scatter(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    rows: Sequence[int] | None = None,
    method: str = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """out [rows of this rank, n] = this rank's rows of the sum over ranks r of a_r [m, k] · b_r [n, k]ᵀ.

    The weight's gradient of a layer whose weight is spread over data-parallel ranks (``sharded_weight_gemm``): with
    Y = X · Wᵀ it is dYᵀ · X, so a is dYᵀ [output features, samples] and b is Xᵀ [input features, samples]
    (arXiv 2604.24013, DP). Transposed views are taken, as packed copies for the call.
    rows: of each rank's slice; they sum to m. None: rank r of W has [r·m/W, (r+1)·m/W), rounded down.
    method: "overlap" ("auto") or "serial". Everything else: see ``gemm_all_reduce``.
    """
    call = _Call(
        comm, "gradient-reduce-scatter", a, b, method, tile, out, stream, Epilogue.of(epilogue), row_sizes=rows
    )
    return call.run()


def gemm_all_to_all(
    a: Any,
    b: Any,
    destinations: Any,
    *,
    comm: Communicator,
    method: str = "auto",
    partition: Partition = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
    **epilogue: Unpack[EpilogueArguments],
) -> Any:
    """Row i of a [m, k] · b [n, k]ᵀ goes to rank destinations[i]; out [received rows, n] = epilogue(what came).

    destinations: m ranks, a list or an array of integers; m may differ between ranks, and be 0. The output has the
    rows of rank 0 first, then those of rank 1, …, each in their order there (``GemmAllToAll.rows_from`` counts them).
    residual, residual_out and out: [received rows, n]. Everything else: see ``gemm_all_reduce``.
    """
    epilogue_of_call = Epilogue.of(epilogue)
    call = _Call(
        comm, "gemm-all-to-all", a, b, method, tile, out, stream, epilogue_of_call, partition, destinations=destinations
    )
    return call.run()
