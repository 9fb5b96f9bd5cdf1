"""GEMMs whose result travels while it is computed.

All compute D_r = A_r · B_rᵀ on each rank r, with A [m, k] and B [n, k] (a linear layer's weight as frameworks store
it), and then exchange D. Elements are float32, float16 or bfloat16; sums are taken in float32, over ranks in rank
order, so results have the same bits on every call and with every method.

Inputs may be strided, transposed, broadcast or reversed: where rows are not dense the call works on a packed copy.
``out`` and ``residual_out`` must have dense rows and lie apart from the inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from . import _arrays, _core
from .errors import ArgumentTypeError, BadArgumentError, CommunicationError
from .planning import Plan
from .ranks import Communicator

Partition = str | Sequence[int]
Tile = Sequence[int] | None
Value = TypeVar("Value")

_MOST_OPERATORS = 32  # Kept per communicator by the functions.


def _integers(values: Any, name: str, expected: str) -> list[int]:
    try:
        numbers = [int(value) for value in values]
        exact = all(number == value for number, value in zip(numbers, values, strict=False))
    except (TypeError, ValueError):
        exact = False
    if not exact:
        raise BadArgumentError(f"{name} is {values!r}; expected {expected}")
    return numbers


def _tile_list(tile: Tile) -> list[int]:
    if tile is None or (isinstance(tile, str) and tile == "auto"):
        return []
    numbers = _integers(tile, "tile", "(rows, columns) or (rows, columns, swizzle)")
    if len(numbers) not in (2, 3) or any(number < 1 for number in numbers):
        raise BadArgumentError(f"tile is {tile!r}; expected (rows, columns) or (rows, columns, swizzle), each >= 1")
    return numbers


def _partition_list(partition: Partition) -> list[int]:
    if isinstance(partition, str):
        if partition != "auto":
            raise BadArgumentError(f"partition is {partition!r}; expected 'auto' or the waves of each group")
        return []
    numbers = _integers(partition, "partition", "'auto' or the waves of each group")
    if any(number < 1 for number in numbers):
        raise BadArgumentError(f"partition is {partition!r}; expected 'auto' or positive numbers of waves")
    return numbers


@dataclass(frozen=True)
class _Shape:
    """What all ranks must pass alike (m apart, for an all-to-all)."""

    operation: str
    m: int
    n: int
    k: int
    dtype: str
    tile: tuple[int, ...]
    partition: tuple[int, ...]
    rows: str = "contiguous"
    overlap: str = "signal"

    def __str__(self) -> str:
        m = "" if self.operation in ("gemm-all-to-all", "all-gather-gemm") else f"m={self.m} "
        rows = f" rows={self.rows} overlap={self.overlap}" if self.operation == "gemm-reduce-scatter" else ""
        tile = "x".join(map(str, self.tile)) or "auto"
        partition = ",".join(map(str, self.partition)) or "auto"
        return f"{self.operation} {m}n={self.n} k={self.k} {self.dtype}{rows} tile={tile} partition={partition}"


def _share(total: int, parts: int, index: int) -> int:
    return (index + 1) * total // parts - index * total // parts


@dataclass
class _Epilogue:
    """y = activation(sum + bias); h = y + residual; out = rms_norm_weight ? h / sqrt(mean(h²) + eps) · weight : h"""

    bias: Any = None
    activation: str | None = None
    residual: Any = None
    residual_out: Any = None
    rms_norm_weight: Any = None
    rms_norm_eps: float = 1e-6


_ACTIVATIONS = ("none", "relu", "gelu", "silu")
_METHODS = ("auto", "overlap", "serial")
_SCATTER_METHODS = (*_METHODS, "signal", "tail-free")


def _check_epilogue(epilogue: _Epilogue) -> None:
    activation = epilogue.activation or "none"
    if activation not in _ACTIVATIONS:
        raise BadArgumentError(f"activation is {activation!r}; expected None or one of {', '.join(_ACTIVATIONS)}")
    eps = epilogue.rms_norm_eps
    if not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise BadArgumentError(f"rms_norm_eps is {eps!r}; expected a finite number >= 0")
    if epilogue.residual_out is not None and epilogue.residual is None:
        raise BadArgumentError("residual_out is given without residual; expected both, or neither")


def _check_method(method: str, operation: str = "") -> None:
    accepted = _SCATTER_METHODS if operation == "gemm-reduce-scatter" else _METHODS
    if method not in accepted:
        raise BadArgumentError(f"method is {method!r}; expected one of {', '.join(accepted)}")


def _overlap_of(operation: str, method: str) -> str:
    """How it overlaps where there is a choice: signal, tail-free or auto."""
    if operation != "gemm-reduce-scatter":
        return "signal"
    return method if method in ("signal", "tail-free") else "auto"


def _check_stream(stream: Any) -> None:
    if stream is not None:
        raise BadArgumentError(f"stream is {stream!r}; calls on the CPU have none, expected None")


@dataclass
class _Inputs:
    """The arrays of one call that do not depend on how many rows come out."""

    a: _core.Array
    b: _core.Array
    bias: _core.Array | None
    rms_norm_weight: _core.Array | None
    owners: list[Any] = field(default_factory=list)


def _view_inputs(a: Any, b: Any, epilogue: _Epilogue) -> _Inputs:
    _check_epilogue(epilogue)
    inputs = _Inputs(
        a=_arrays.view(a, "a", ndim=2),
        b=_arrays.view(b, "b", ndim=2),
        bias=_arrays.optional_view(epilogue.bias, "bias", ndim=1),
        rms_norm_weight=_arrays.optional_view(epilogue.rms_norm_weight, "rms_norm_weight", ndim=1),
        owners=[a, b, epilogue],
    )
    n, k = inputs.b.shape
    if inputs.a.shape[1] != k:
        raise BadArgumentError(
            f"a has shape {list(inputs.a.shape)} and b {list(inputs.b.shape)}; expected a [m, k] and b [n, k]"
        )
    for array in (inputs.b, inputs.bias, inputs.rms_norm_weight):
        _arrays.require_dtype(array, inputs.a)
    _arrays.require_shape(inputs.bias, [n], "[n]")
    _arrays.require_shape(inputs.rms_norm_weight, [n], "[n]")
    return inputs


def _require_problem(inputs: _Inputs, m: int, n: int, k: int, dtype: str) -> None:
    _arrays.require_shape(inputs.a, [m, k], "[m, k]")
    _arrays.require_shape(inputs.b, [n, k], "[n, k]")
    if inputs.a.dtype != dtype:
        raise ArgumentTypeError(
            f"a has type {_arrays.LONG_NAMES[inputs.a.dtype]}; this operator was made for {_arrays.LONG_NAMES[dtype]}"
        )


@dataclass
class _Outputs:
    out: Any
    out_view: _core.Array
    residual: _core.Array | None
    residual_out: _core.Array | None


def _view_outputs(a: Any, inputs: _Inputs, out: Any, epilogue: _Epilogue, rows: int) -> _Outputs:
    shape = [rows, inputs.b.shape[0]]
    if out is None:
        out = _arrays.empty_like(a, shape)
    outputs = _Outputs(
        out=out,
        out_view=_arrays.view(out, "out", ndim=2, writable=True),
        residual=_arrays.optional_view(epilogue.residual, "residual", ndim=2),
        residual_out=_arrays.optional_view(epilogue.residual_out, "residual_out", ndim=2, writable=True),
    )
    for array in (outputs.out_view, outputs.residual, outputs.residual_out):
        _arrays.require_shape(array, shape, "[output rows, n]")
        _arrays.require_dtype(array, inputs.a)
    _arrays.require_dense_rows(outputs.out_view)
    _arrays.require_dense_rows(outputs.residual_out)
    return outputs


def _run(
    operator: _core.Operator,
    inputs: _Inputs,
    outputs: _Outputs,
    epilogue: _Epilogue,
    method: str,
    timeline: _core.Timeline | None,
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
        method,
        timeline,
    )


class _GemmOperator:
    """What the classes for repeated calls have in common."""

    _NAME = ""

    def __init__(
        self, comm: Communicator, shape: _Shape, destinations: Sequence[int] = (), sizes: Sequence[int] = ()
    ) -> None:
        if not isinstance(comm, Communicator):
            raise ArgumentTypeError(f"comm is a {type(comm).__name__}; expected a flashoverlap.Communicator")
        self._shape = shape
        self.comm = comm
        self._core = _core.make_operator(
            comm._get_context(),
            shape.operation,
            shape.m,
            shape.n,
            shape.k,
            shape.dtype,
            list(shape.tile),
            list(shape.partition),
            shape.rows,
            shape.overlap,
            list(destinations),
            list(sizes),
        )

    @property
    def output_rows(self) -> int:
        """Rows of this rank's output."""
        return self._core.output_rows

    def plan(self, method: str = "auto") -> Plan:
        """What this rank carries out."""
        return Plan(self._core.plan_json(self._how(method)))

    def _how(self, method: str) -> str:
        """ "overlap" or "serial". An operator has one way to overlap, chosen when it was made."""
        _check_method(method)
        return "serial" if method == "serial" else "overlap"

    def __call__(
        self,
        a: Any,
        b: Any,
        *,
        bias: Any = None,
        activation: str | None = None,
        residual: Any = None,
        residual_out: Any = None,
        rms_norm_weight: Any = None,
        rms_norm_eps: float = 1e-6,
        method: str = "auto",
        out: Any = None,
        stream: Any = None,
        timeline: _core.Timeline | None = None,
    ) -> Any:
        """One call; the arguments are those of the function of the same name. All ranks call, as a collective.

        timeline: what ran where and when is added to it.
        """
        how = self._how(method)
        _check_stream(stream)
        epilogue = _Epilogue(bias, activation, residual, residual_out, rms_norm_weight, rms_norm_eps)
        inputs = _view_inputs(a, b, epilogue)
        _require_problem(inputs, self._shape.m, self._shape.n, self._shape.k, self._shape.dtype)
        outputs = _view_outputs(a, inputs, out, epilogue, self.output_rows)
        _run(self._core, inputs, outputs, epilogue, how, timeline)
        return _arrays.like_framework(outputs.out, a) if out is None else out

    def __repr__(self) -> str:
        return f"<flashoverlap.{type(self).__name__} {self._shape}, rank {self.comm.rank} of {self.comm.size}>"


def _shape_of(
    operation: str,
    m: int,
    n: int,
    k: int,
    dtype: Any,
    tile: Tile,
    partition: Partition,
    rows: str = "contiguous",
    overlap: str = "signal",
) -> _Shape:
    for name, value in (("m", m), ("n", n), ("k", k)):
        if not hasattr(value, "__index__") or value < 0:
            raise BadArgumentError(f"{name} is {value!r}; expected an integer >= 0")
    if rows not in ("contiguous", "block-cyclic"):
        raise BadArgumentError(f"rows is {rows!r}; expected 'contiguous' or 'block-cyclic'")
    if overlap == "tail-free" and (rows != "contiguous" or not isinstance(partition, str)):
        raise BadArgumentError("method 'tail-free' has contiguous rows and no partition; expected 'signal' or 'auto'")
    return _Shape(
        operation,
        int(m),
        int(n),
        int(k),
        _arrays.dtype_name(dtype),
        tuple(_tile_list(tile)),
        tuple(_partition_list(partition)),
        rows,
        overlap,
    )


class GemmAllReduce(_GemmOperator):
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
        super().__init__(comm, _shape_of("gemm-all-reduce", m, n, k, dtype, tile, partition))


class GemmReduceScatter(_GemmOperator):
    """``gemm_reduce_scatter`` for repeated calls of one shape. Making it is collective; ``method`` is chosen here."""

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
    ) -> None:
        operation = "gemm-reduce-scatter"
        _check_method(method, operation)
        overlap = _overlap_of(operation, method)
        super().__init__(comm, _shape_of(operation, m, n, k, dtype, tile, partition, rows, overlap))

    def owned_rows(self) -> list[int]:
        """Global row of each output row of this rank, ascending."""
        tile_m = self.plan().to_dict()["grid"]["tile_m"]
        return _core.owned_rows(self._shape.m, tile_m, self.comm.size, self.comm.rank, self._shape.rows)


class GemmAllToAll(_GemmOperator):
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
        ranks = _destination_list(destinations, comm.size)
        super().__init__(comm, _shape_of("gemm-all-to-all", len(ranks), n, k, dtype, tile, partition), ranks)

    @property
    def rows_from(self) -> list[int]:
        """Rows that come from each rank; the output has them in this order."""
        return self._core.rows_from


def _destination_list(destinations: Any, size: int) -> list[int]:
    values = destinations.tolist() if hasattr(destinations, "tolist") else destinations
    ranks = _integers(values, "destinations", "one rank for each row of a")
    for row, rank in enumerate(ranks):
        if not 0 <= rank < size:
            raise BadArgumentError(f"destinations[{row}] is {rank}; expected a rank from 0 to {size - 1}")
    return ranks


def _agree(comm: Communicator, operation: str, work: Callable[[], tuple[Value, str, str]]) -> tuple[Value, list[str]]:
    """Runs ``work`` on each rank: it returns a value, what must be equal on all ranks, and what may differ.

    Returns the value and the latter of all ranks. When it raised on one rank, all ranks raise; when ranks differ, too.
    So a wrong argument on one rank is an error everywhere, before anything is computed.
    """
    error: Exception | None = None
    try:
        value, common, own = work()
        message = f"ok\0{common}\0{own}"
    except Exception as caught:
        error = caught
        message = f"error\0{type(caught).__name__}: {caught}\0"
    if comm.size == 1:
        if error is not None:
            raise error
        return value, [own]
    answers = [answer.decode().split("\0") for answer in comm.exchange(message.encode())]
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer[0] != "ok":
            text = answer[1] if len(answer) > 1 else "it makes another call"
            raise CommunicationError(f"rank {rank} cannot take part in {operation}: {text}")
    for rank, answer in enumerate(answers):
        if answer[1] != answers[0][1]:
            raise BadArgumentError(f"ranks disagree: rank 0 calls {answers[0][1]}, rank {rank} calls {answer[1]}")
    return value, [answer[2] for answer in answers]


def _operator_for(comm: Communicator, key: Any, make: Callable[[], Any]) -> Any:
    """The operator of an agreed key, least recently used ones forgotten. All ranks hit, or all miss."""
    operators: dict[Any, Any] = comm._operators
    operator = operators.pop(key, None)
    if operator is None:
        while len(operators) >= _MOST_OPERATORS:
            operators.pop(next(iter(operators)))
        operator = make()
    operators[key] = operator
    return operator


@dataclass
class _Call:
    """A call of one of the functions."""

    comm: Communicator
    operation: str
    a: Any
    b: Any
    epilogue: _Epilogue
    method: str
    partition: Partition
    tile: Tile
    out: Any
    stream: Any
    rows: str = "contiguous"
    destinations: Any = None

    def rows_known(self, m: int) -> int | None:
        """Output rows, where they follow from m alone."""
        if self.operation == "gemm-all-reduce":
            return m
        if self.operation == "gemm-reduce-scatter" and self.rows == "contiguous":
            return _share(m, self.comm.size, self.comm.rank)
        return None

    def check(self) -> tuple[tuple[_Shape, _Inputs, _Outputs | None, list[int]], str, str]:
        _check_method(self.method, self.operation)
        _check_stream(self.stream)
        inputs = _view_inputs(self.a, self.b, self.epilogue)
        m, k = inputs.a.shape
        overlap = _overlap_of(self.operation, self.method)
        n = inputs.b.shape[0]
        shape = _shape_of(self.operation, m, n, k, inputs.a.dtype, self.tile, self.partition, self.rows, overlap)
        destinations: list[int] = []
        if self.operation == "gemm-all-to-all":
            destinations = _destination_list(self.destinations, self.comm.size)
            if len(destinations) != m:
                raise BadArgumentError(
                    f"destinations has {len(destinations)} entries; expected one for each of the {m} rows of a "
                    f"{list(inputs.a.shape)}"
                )
        rows = self.rows_known(m)
        outputs = None if rows is None else self.view_outputs(inputs, rows)
        own = hashlib.sha256(repr(destinations).encode()).hexdigest() if self.destinations is not None else ""
        method = "serial" if self.method == "serial" else "overlap"
        return (shape, inputs, outputs, destinations), f"{shape} method={method}", own

    def view_outputs(self, inputs: _Inputs, rows: int) -> _Outputs:
        return _view_outputs(self.a, inputs, self.out, self.epilogue, rows)

    def run(self) -> Any:
        if not isinstance(self.comm, Communicator):
            raise ArgumentTypeError(f"comm is a {type(self.comm).__name__}; expected a flashoverlap.Communicator")
        (shape, inputs, known, destinations), routing = _agree(self.comm, self.operation, self.check)
        # Two all-to-alls of a rank may be alike where those of another are not.
        key = (str(shape), tuple(routing))
        operator: _GemmOperator = _operator_for(self.comm, key, lambda: _GemmOperator(self.comm, shape, destinations))
        outputs: _Outputs
        if known is not None:
            outputs = known
        else:  # Only now it is known how many rows come.
            rows = operator.output_rows
            outputs, _ = _agree(self.comm, self.operation, lambda: (self.view_outputs(inputs, rows), "", ""))
        how = "serial" if self.method == "serial" else "overlap"
        _run(operator._core, inputs, outputs, self.epilogue, how, None)
        return _arrays.like_framework(outputs.out, self.a) if self.out is None else self.out


def gemm_all_reduce(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    residual_out: Any = None,
    rms_norm_weight: Any = None,
    rms_norm_eps: float = 1e-6,
    method: str = "auto",
    partition: Partition = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """out [m, n] = epilogue(sum over ranks r of a_r [m, k] · b_r [n, k]ᵀ), on every rank: a row-parallel linear layer.

    Applied once, to the sum, in float32:
    y = activation(sum + bias); h = y + residual; out = h / sqrt(mean(h²) + rms_norm_eps) · rms_norm_weight, or h.

    bias, rms_norm_weight: [n]. activation: None, "relu", "gelu" (the exact one) or "silu".
    residual: [m, n]; residual_out: [m, n], gets h; may be ``residual`` itself.
    method: "overlap" ("auto" is this), or "serial": GEMM, then one all-reduce, then the epilogue; the same bits.
    partition: waves of each group of the overlap, or "auto". tile: (rows, columns) or (rows, columns, swizzle).
    out: [m, n] where the result goes; otherwise a new array of the framework of ``a``. stream: None on the CPU.

    Collective. The ranks first compare their calls, so that an error on one rank is an error on every rank before
    anything is computed; ``GemmAllReduce`` does that once for many calls. Raises BadArgumentError (a ValueError) for
    shapes, strides, read-only or overlapping arrays and options, ArgumentTypeError (a TypeError) for element types and
    things that are no arrays, CommunicationError and TimeoutError when another rank fails.
    """
    epilogue = _Epilogue(bias, activation, residual, residual_out, rms_norm_weight, rms_norm_eps)
    return _Call(comm, "gemm-all-reduce", a, b, epilogue, method, partition, tile, out, stream).run()


def gemm_reduce_scatter(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    rows: str = "contiguous",
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    residual_out: Any = None,
    rms_norm_weight: Any = None,
    rms_norm_eps: float = 1e-6,
    method: str = "auto",
    partition: Partition = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """out [owned rows, n] = epilogue(this rank's rows of the sum over ranks r of a_r [m, k] · b_r [n, k]ᵀ).

    method: also "signal" (wave groups, arXiv 2504.19519) and "tail-free" (slices by direct transfers,
    arXiv 2604.24013); "auto" takes the latter where rows are contiguous and no partition is given. The same bits all.
    rows: "contiguous": rank r of W owns rows [r·m/W, (r+1)·m/W), rounded down; "block-cyclic": each tile is cut into W
    slabs and rank r owns slab r of each (``GemmReduceScatter.owned_rows`` lists them).
    residual, residual_out and out: [owned rows, n]. Everything else: see ``gemm_all_reduce``.
    """
    epilogue = _Epilogue(bias, activation, residual, residual_out, rms_norm_weight, rms_norm_eps)
    call = _Call(comm, "gemm-reduce-scatter", a, b, epilogue, method, partition, tile, out, stream, rows)
    return call.run()


def gemm_all_to_all(
    a: Any,
    b: Any,
    destinations: Any,
    *,
    comm: Communicator,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    residual_out: Any = None,
    rms_norm_weight: Any = None,
    rms_norm_eps: float = 1e-6,
    method: str = "auto",
    partition: Partition = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Row i of a [m, k] · b [n, k]ᵀ goes to rank destinations[i]; out [received rows, n] = epilogue(what came).

    destinations: m ranks, a list or an array of integers; m may differ between ranks, and be 0. The output has the
    rows of rank 0 first, then those of rank 1, …, each in their order there (``GemmAllToAll.rows_from`` counts them).
    residual, residual_out and out: [received rows, n]. Everything else: see ``gemm_all_reduce``.
    """
    epilogue = _Epilogue(bias, activation, residual, residual_out, rms_norm_weight, rms_norm_eps)
    call = _Call(
        comm,
        "gemm-all-to-all",
        a,
        b,
        epilogue,
        method,
        partition,
        tile,
        out,
        stream,
        destinations=destinations,
    )
    return call.run()


class AllGatherGemm(_GemmOperator):
    """``all_gather_gemm`` for repeated calls of one shape. Making it is collective.

    rows: of each rank's slice of a; they sum to m. None: rank r of W has [r·m/W, (r+1)·m/W), rounded down.
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
        tile: Tile = None,
    ) -> None:
        shape = _shape_of("all-gather-gemm", m, n, k, dtype, tile, "auto")
        sizes = _integers(rows or [], "rows", "one number for each rank")
        super().__init__(comm, shape, sizes=sizes)
        self._rows = sizes[comm.rank] if sizes else _share(shape.m, comm.size, comm.rank)

    def __call__(self, a: Any, b: Any, *, gathered: Any = None, **options: Any) -> Any:
        """a: this rank's slice, [rows, k]. gathered: [m, k], C-contiguous, gets all slices."""
        whole = _arrays.empty_like(a, [self._shape.m, self._shape.k]) if gathered is None else gathered
        slice_view = _arrays.view(a, "a", ndim=2)
        _arrays.require_shape(slice_view, [self._rows, self._shape.k], "[rows of this rank, k]")
        whole_view = _arrays.view(whole, "gathered", ndim=2, writable=True)
        _arrays.require_dtype(whole_view, slice_view)
        _arrays.require_shape(whole_view, [self._shape.m, self._shape.k], "[m, k]")
        self._core.place_slice(slice_view, whole_view)
        out = super().__call__(whole, b, **options)
        return _arrays.like_framework(out, a) if options.get("out") is None else out


def all_gather_gemm(
    a: Any,
    b: Any,
    *,
    comm: Communicator,
    gathered: Any = None,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    residual_out: Any = None,
    rms_norm_weight: Any = None,
    rms_norm_eps: float = 1e-6,
    method: str = "auto",
    tile: Tile = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """out [m, n] = epilogue(all ranks' a_r [m_r, k], one after the other, · b [n, k]ᵀ), b this rank's own.

    A column-parallel linear layer behind sequence parallelism: slices of a arrive while the GEMM runs, this rank's own
    first (arXiv 2604.24013). m_r may differ between ranks and be 0. gathered: [m, k], C-contiguous, gets all slices.
    method: "overlap" ("auto") or "serial". Everything else: see ``gemm_all_reduce``.
    """
    if not isinstance(comm, Communicator):
        raise ArgumentTypeError(f"comm is a {type(comm).__name__}; expected a flashoverlap.Communicator")
    epilogue = _Epilogue(bias, activation, residual, residual_out, rms_norm_weight, rms_norm_eps)

    def check() -> tuple[_Shape, str, str]:
        _check_method(method)
        _check_stream(stream)
        inputs = _view_inputs(a, b, epilogue)
        m, k = inputs.a.shape
        shape = _shape_of("all-gather-gemm", m, 0, k, inputs.a.dtype, tile, "auto")
        return shape, f"{shape} method={'serial' if method == 'serial' else 'overlap'}", f"{m} {inputs.b.shape[0]}"

    shape, owns = _agree(comm, "all-gather-gemm", check)
    rows = [int(own.split()[0]) for own in owns]
    columns = [int(own.split()[1]) for own in owns]
    whole = [sum(rows), shape.k]
    if len(set(columns)) > 1:
        raise BadArgumentError(f"ranks disagree: b has {columns} rows on ranks 0, 1, …; expected as many on each")

    def prepare() -> tuple[Any, str, str]:
        into = _arrays.empty_like(a, whole) if gathered is None else gathered
        view = _arrays.view(into, "gathered", ndim=2, writable=True)
        _arrays.require_shape(view, whole, "[m, k]")
        _arrays.require_dtype(view, _arrays.view(a, "a", ndim=2))
        if not view.is_dense:
            raise BadArgumentError(f"{view!r} has gaps; expected a C-contiguous array")
        inputs = _view_inputs(into, b, epilogue)
        outputs = _view_outputs(a, inputs, out, epilogue, whole[0])
        for written in (outputs.out_view, outputs.residual_out):
            if written is not None and written.overlaps(_arrays.view(a, "a", ndim=2)):
                raise BadArgumentError(f"{written!r} overlaps a; they must lie apart")
        return (into, view, inputs, outputs), "", ""

    (_into, view, inputs, outputs), _ = _agree(comm, "all-gather-gemm", prepare)
    key = (str(shape), tuple(rows), columns[0])
    operator: AllGatherGemm = _operator_for(
        comm,
        key,
        lambda: AllGatherGemm(comm, m=whole[0], n=columns[0], k=shape.k, dtype=shape.dtype, rows=rows, tile=tile),
    )
    operator._core.place_slice(_arrays.view(a, "a", ndim=2), view)
    _run(operator._core, inputs, outputs, epilogue, "serial" if method == "serial" else "overlap", None)
    return _arrays.like_framework(outputs.out, a) if out is None else out
