"""What all GEMM operators have in common: problem, epilogue, arrays of a call, and the class for repeated calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from . import _arrays, _core
from ._agreement import require_communicator
from ._devices import HOST, hold, stream_of
from ._options import (
    ACTIVATIONS,
    METHODS,
    SLICED_METHODS,
    Partition,
    Tile,
    carried_out,
    count,
    partition_list,
    slice_sizes,
    tile_list,
)
from .errors import ArgumentTypeError, BadArgumentError
from .planning import Plan
from .ranks import Communicator

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Sizes that ranks need not pass alike, by operation.
_FREE = {"gemm-all-to-all": "m", "all-gather-gemm": "m", "sharded-weight-gemm": "n", "gemm-all-to-all-heads": "m"}


@dataclass(frozen=True)
class Shape:
    """What the ranks agree on. As text: what all must pass alike."""

    operation: str
    m: int
    n: int
    k: int
    dtype: str
    tile: tuple[int, ...] = ()
    partition: tuple[int, ...] = ()
    rows: str = "contiguous"
    overlap: str = "signal"
    row_sizes: tuple[int, ...] = ()
    column_sizes: tuple[int, ...] = ()
    parts: int = 0
    send_channels: int = 0
    num_slices: int = 0

    def __str__(self) -> str:
        words = [self.operation]
        free = _FREE.get(self.operation, "")
        words += [
            f"{name}={value}" for name, value in zip("mnk", (self.m, self.n, self.k), strict=True) if name != free
        ]
        words.append(self.dtype)
        if self.operation == "gemm-reduce-scatter":
            words.append(f"rows={self.rows} overlap={self.overlap}")
        words += [
            f"{name}={','.join(map(str, sizes))}"
            for name, sizes in (("rows", self.row_sizes), ("columns", self.column_sizes))
            if sizes
        ]
        words += [
            f"{name}={getattr(self, name)}" for name in ("parts", "send_channels", "num_slices") if getattr(self, name)
        ]
        words.append(f"tile={'x'.join(map(str, self.tile)) or 'auto'}")
        words.append(f"partition={','.join(map(str, self.partition)) or 'auto'}")
        return " ".join(words)


def shape_of(
    operation: str,
    m: int,
    n: int,
    k: int,
    dtype: Any,
    *,
    tile: Tile = None,
    partition: Partition = "auto",
    rows: str = "contiguous",
    overlap: str = "signal",
    row_sizes: Sequence[int] = (),
    column_sizes: Sequence[int] = (),
    parts: int = 0,
    send_channels: int = 0,
    num_slices: int = 0,
) -> Shape:
    """Checks what can be checked without the other ranks."""
    if rows not in ("contiguous", "block-cyclic"):
        raise BadArgumentError(f"rows is {rows!r}; expected 'contiguous' or 'block-cyclic'")
    if overlap == "tail-free" and (rows != "contiguous" or not isinstance(partition, str)):
        raise BadArgumentError("method 'tail-free' has contiguous rows and no partition; expected 'signal' or 'auto'")
    return Shape(
        operation,
        count(m, "m"),
        count(n, "n"),
        count(k, "k"),
        _arrays.dtype_name(dtype),
        tuple(tile_list(tile)),
        tuple(partition_list(partition)),
        rows,
        overlap,
        tuple(row_sizes),
        tuple(column_sizes),
        count(parts, "parts"),
        count(send_channels, "send_channels"),
        count(num_slices, "num_slices"),
    )


class EpilogueArguments(TypedDict, total=False):
    """Keyword arguments of every GEMM: y = activation(sum + bias); h = y + residual;
    out = h / sqrt(mean(h²) + rms_norm_eps) · rms_norm_weight where that is given, otherwise h."""

    bias: Any
    activation: str | None
    residual: Any
    residual_out: Any
    rms_norm_weight: Any
    rms_norm_eps: float


@dataclass
class Epilogue:
    bias: Any = None
    activation: str | None = None
    residual: Any = None
    residual_out: Any = None
    rms_norm_weight: Any = None
    rms_norm_eps: float = 1e-6

    @staticmethod
    def of(arguments: EpilogueArguments) -> Epilogue:
        accepted = [one.name for one in fields(Epilogue)]
        for name in arguments:
            if name not in accepted:
                raise ArgumentTypeError(
                    f"{name!r} is no argument of this call; of the epilogue there are {', '.join(accepted)}"
                )
        return Epilogue(**arguments)

    def check(self) -> None:
        activation = self.activation or "none"
        if activation not in ACTIVATIONS:
            raise BadArgumentError(f"activation is {activation!r}; expected None or one of {', '.join(ACTIVATIONS)}")
        eps = self.rms_norm_eps
        if not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
            raise BadArgumentError(f"rms_norm_eps is {eps!r}; expected a finite number >= 0")
        if self.residual_out is not None and self.residual is None:
            raise BadArgumentError("residual_out is given without residual; expected both, or neither")


@dataclass
class Inputs:
    """The arrays of one call that do not depend on how many rows come out."""

    a: _core.Array
    b: _core.Array
    bias: _core.Array | None
    rms_norm_weight: _core.Array | None
    columns: int  # Of the output.
    device: int = HOST
    stream: int = 0
    owners: list[Any] = field(default_factory=list)


def view_matrices(a: Any, b: Any, device: int, inner: int | None = None) -> tuple[_core.Array, _core.Array]:
    """inner: columns of a, where it has not all of b's."""
    a_view, b_view = (_arrays.view(array, name, ndim=2, device=device) for array, name in ((a, "a"), (b, "b")))
    if inner is not None:
        _arrays.require_shape(a_view, [a_view.shape[0], inner], "[m, columns of this rank]")
        if a_view.has_dense_rows and not a_view.is_dense:  # Others are packed.
            raise BadArgumentError(f"{a_view!r} has gaps between its rows; its parts travel, so expected none")
    elif a_view.shape[1] != b_view.shape[1]:
        raise BadArgumentError(
            f"a has shape {list(a_view.shape)} and b {list(b_view.shape)}; expected a [m, k] and b [n, k]"
        )
    _arrays.require_dtype(b_view, a_view)
    return a_view, b_view


def view_inputs(
    a: Any,
    b: Any,
    epilogue: Epilogue,
    stream: Any,
    comm: Communicator,
    columns: int | None = None,
    inner: int | None = None,
) -> Inputs:
    """columns: of the output, where b has not as many rows; inner: of a, where b has more."""
    epilogue.check()
    device = comm._device
    handle = stream_of(stream, a, device)
    a_view, b_view = view_matrices(a, b, device, inner)
    n = b_view.shape[0] if columns is None else columns
    inputs = Inputs(
        a=a_view,
        b=b_view,
        bias=_arrays.optional_view(epilogue.bias, "bias", ndim=1, device=device),
        rms_norm_weight=_arrays.optional_view(epilogue.rms_norm_weight, "rms_norm_weight", ndim=1, device=device),
        columns=n,
        device=device,
        stream=handle,
        owners=[a, b, epilogue.bias, epilogue.rms_norm_weight],
    )
    meaning = "[n]" if columns is None else "[columns of this rank]"
    for array in (inputs.bias, inputs.rms_norm_weight):
        _arrays.require_dtype(array, inputs.a)
        _arrays.require_shape(array, [n], meaning)
    return inputs


@dataclass
class Outputs:
    out: Any
    out_view: _core.Array
    residual: _core.Array | None
    residual_out: _core.Array | None


def view_outputs(a: Any, inputs: Inputs, out: Any, epilogue: Epilogue, rows: int) -> Outputs:
    shape = [rows, inputs.columns]
    if out is None:
        out = _arrays.empty_like(a, shape, inputs.device)
    written: dict[str, Any] = {"ndim": 2, "writable": True, "device": inputs.device}
    outputs = Outputs(
        out=out,
        out_view=_arrays.view(out, "out", **written),
        residual=_arrays.optional_view(epilogue.residual, "residual", ndim=2, device=inputs.device),
        residual_out=_arrays.optional_view(epilogue.residual_out, "residual_out", **written),
    )
    for array in (outputs.out_view, outputs.residual, outputs.residual_out):
        _arrays.require_shape(array, shape, "[output rows, n]")
        _arrays.require_dtype(array, inputs.a)
    _arrays.require_dense_rows(outputs.out_view)
    _arrays.require_dense_rows(outputs.residual_out)
    return outputs


def run(
    operator: _core.Operator,
    inputs: Inputs,
    outputs: Outputs,
    epilogue: Epilogue,
    how: str,
    timeline: _core.Timeline | None = None,
) -> None:
    operator.run(
        inputs.a,
        inputs.b,
        outputs.out_view,
        inputs.bias,
        epilogue.activation or "none",
        outputs.residual,
        outputs.residual_out,
        inputs.rms_norm_weight,
        float(epilogue.rms_norm_eps),
        how,
        inputs.stream,
        timeline,
    )
    if inputs.device != HOST:  # The call has been put into the stream, no more.
        arrays = [*inputs.owners, outputs.out, epilogue.residual, epilogue.residual_out]
        hold((array for array in arrays if array is not None), inputs.stream, inputs.device)


class GemmOperator:
    """What the classes for repeated calls have in common."""

    _METHODS: Sequence[str] = METHODS

    def __init__(self, comm: Communicator, shape: Shape, destinations: Sequence[int] = ()) -> None:
        require_communicator(comm)
        self._shape = shape
        self.comm = comm
        self._core = _core.make_operator(
            comm._get_context(),
            shape.operation,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            dtype=shape.dtype,
            tile=list(shape.tile),
            partition=list(shape.partition),
            rows=shape.rows,
            overlap=shape.overlap,
            destinations=list(destinations),
            row_sizes=list(shape.row_sizes),
            column_sizes=list(shape.column_sizes),
            parts=shape.parts,
            send_channels=shape.send_channels,
            num_slices=shape.num_slices,
        )

    @property
    def output_rows(self) -> int:
        """Rows of this rank's output."""
        return self._core.output_rows

    @property
    def output_columns(self) -> int:
        """Columns of this rank's output."""
        return self._core.output_columns

    def plan(self, method: str = "auto") -> Plan:
        """What this rank carries out. An operator has one way to overlap, chosen when it was made."""
        return Plan(self._core.plan_json(carried_out(method, self._METHODS)))

    def __call__(
        self,
        a: Any,
        b: Any,
        *,
        method: str = "auto",
        out: Any = None,
        stream: Any = None,
        timeline: _core.Timeline | None = None,
        **epilogue: Unpack[EpilogueArguments],
    ) -> Any:
        """One call; the arguments are those of the function of the same name. All ranks call, as a collective.

        timeline: what ran where and when is added to it.
        """
        how = carried_out(method, self._METHODS)
        applied = Epilogue.of(epilogue)
        inputs = view_inputs(a, b, applied, stream, self.comm, self._columns(), self._inner())
        self._require_problem(inputs)
        outputs = view_outputs(a, inputs, out, applied, self.output_rows)
        run(self._core, inputs, outputs, applied, how, timeline)
        return _arrays.like_framework(outputs.out, a) if out is None else out

    def _columns(self) -> int | None:
        """Columns of the output where they are not b's rows."""
        return None

    def _inner(self) -> int | None:
        """Columns of a where they are not b's."""
        return None

    def _a_shape(self) -> list[int]:
        return [self._shape.m, self._shape.k]

    def _require_problem(self, inputs: Inputs) -> None:
        _arrays.require_shape(inputs.a, self._a_shape(), "[m, k]")
        _arrays.require_shape(inputs.b, [self._shape.n, self._shape.k], "[n, k]")
        if inputs.a.dtype != self._shape.dtype:
            has, expected = _arrays.LONG_NAMES[inputs.a.dtype], _arrays.LONG_NAMES[self._shape.dtype]
            raise ArgumentTypeError(f"a has type {has}; this operator was made for {expected}")

    def _sliced_rows(self) -> list[int]:
        if not self._shape.num_slices:
            raise BadArgumentError(f"{self!r} was made without a sliced baseline; expected num_slices >= 1")
        return self._core.sliced_rows

    def __repr__(self) -> str:
        return f"<flashoverlap.{type(self).__name__} {self._shape}, rank {self.comm.rank} of {self.comm.size}>"


class SlicedGemm(GemmOperator):
    """An operator whose rows travel in one slice per rank."""

    _OPERATION: str
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
        parts: int = 0,
        send_channels: int = 0,
        num_slices: int = 0,
        tile: Tile = None,
    ) -> None:
        require_communicator(comm)
        sizes = slice_sizes(rows, "rows", comm.size)
        shape = shape_of(
            self._OPERATION,
            m,
            n,
            k,
            dtype,
            tile=tile,
            row_sizes=sizes,
            parts=parts,
            send_channels=send_channels,
            num_slices=num_slices,
        )
        super().__init__(comm, shape)
