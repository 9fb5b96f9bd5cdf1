"""Arrays of any framework as views for the compiled half, without copies and without importing a framework."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import _core
from ._devices import HOST, empty_on_gpu, framework_of, require_device, view_cuda_interface
from .errors import ArgumentTypeError, BadArgumentError, UnsupportedError

_NAMES = {
    "float32": "f32",
    "f32": "f32",
    "float": "f32",
    "float16": "f16",
    "f16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "bf16": "bf16",
}
LONG_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def dtype_name(dtype: Any) -> str:
    """ "f32", "f16" or "bf16" for a name, a NumPy, PyTorch or JAX type, or a type's class."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    text = str(text if text is not None else dtype).rpartition(".")[2]
    if text not in _NAMES:
        raise ArgumentTypeError(f"dtype is {dtype!r}; expected float32, float16 or bfloat16")
    return _NAMES[text]


def _view_of_numpy(array: Any, name: str, writable: bool) -> _core.Array:
    dtype = getattr(array.dtype, "name", str(array.dtype))
    if dtype not in ("float32", "float16", "bfloat16") or not array.dtype.isnative:
        native = "" if array.dtype.isnative else " of the other byte order"
        raise ArgumentTypeError(f"{name} has type {dtype}{native}; expected float32, float16 or bfloat16 (ml_dtypes)")
    if writable and not array.flags.writeable:
        raise BadArgumentError(f"{name} {list(array.shape)} is read-only; expected a writable array")
    if any(stride % array.itemsize for stride in array.strides):
        raise BadArgumentError(f"{name} has strides {array.strides} bytes; expected multiples of {array.itemsize}")
    address, _ = array.__array_interface__["data"]
    strides = [stride // array.itemsize for stride in array.strides]
    return _core.Array.from_address(address, list(array.shape), strides, _NAMES[dtype], name, writable, HOST)


def _view_of_lender(array: Any, name: str, writable: bool, device: int) -> _core.Array:
    if framework_of(array) == "torch":
        if array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise BadArgumentError(
                f"{name} requires a gradient, which this call does not pass on; use flashoverlap.torch, or detach()"
            )
        array = array.detach()
    elif writable and framework_of(array) == "jax":
        raise BadArgumentError(f"{name} is a JAX array, which is read-only; expected a writable array, or none")
    if dtype_text(array) not in ("float32", "float16", "bfloat16"):
        raise ArgumentTypeError(f"{name} has type {dtype_text(array)}; expected float32, float16 or bfloat16")
    if device != HOST and framework_of(array) == "torch":
        # Not by DLPack, which would make streams wait for each other: the call goes into the stream that is current.
        shape, strides = list(array.shape), list(array.stride())
        return _core.Array.from_address(
            array.data_ptr(), shape, strides, _NAMES[dtype_text(array)], name, writable, device
        )
    return _view_of_dlpack(array, name, writable, device)


def _view_of_dlpack(array: Any, name: str, writable: bool, device: int) -> _core.Array:
    try:
        source = array
        if device != HOST:
            if hasattr(array, "block_until_ready"):  # JAX
                array.block_until_ready()
            source = array.__dlpack__(stream=-1)
        if writable:
            return _core.Array.from_writable_dlpack(source, name)
        return _core.Array.from_dlpack(source, name)
    except TypeError as error:  # What its own class refuses comes so too.
        what = "read-only, or cannot be shared" if writable else "not to be shared"
        raise BadArgumentError(f"{name} ({type(array).__name__}) is {what} through DLPack") from error
    except (BufferError, RuntimeError) as error:
        raise BadArgumentError(f"{name} ({type(array).__name__}) cannot be shared through DLPack: {error}") from error


def dtype_text(array: Any) -> str:
    dtype = getattr(array, "dtype", "?")
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


def view(array: Any, name: str, *, ndim: int, writable: bool = False, device: int = HOST) -> _core.Array:
    """Where ``array`` is, which must be on ``device``. The caller keeps it alive as long as the view is used."""
    numpy = sys.modules.get("numpy")
    is_numpy = numpy is not None and isinstance(array, numpy.ndarray)
    if not any(hasattr(array, how) for how in ("__dlpack__", "__cuda_array_interface__")):
        raise ArgumentTypeError(
            f"{name} is a {type(array).__name__}; expected an array (NumPy, PyTorch, JAX, or anything with __dlpack__)"
        )
    if not is_numpy or device != HOST:
        require_device(array, name, device)
    shape = getattr(array, "shape", None)
    if shape is not None:
        _require_ndim(shape, name, ndim)
    if is_numpy:
        return _view_of_numpy(array, name, writable)
    if hasattr(array, "__cuda_array_interface__") and framework_of(array) != "torch":
        made = view_cuda_interface(array, name, device, writable)
    elif hasattr(array, "__dlpack__"):
        made = _view_of_lender(array, name, writable, device)
    else:
        raise UnsupportedError(f"{name} ({type(array).__name__}) has no __dlpack__")
    _require_ndim(made.shape, name, ndim)
    return made


def optional_view(
    array: Any, name: str, *, ndim: int, writable: bool = False, device: int = HOST
) -> _core.Array | None:
    return None if array is None else view(array, name, ndim=ndim, writable=writable, device=device)


def _require_ndim(shape: Sequence[int], name: str, ndim: int) -> None:
    if len(shape) != ndim:
        kind = {1: "a vector", 2: "a matrix"}.get(ndim, "a stack of matrices")
        raise BadArgumentError(f"{name} has shape {list(shape)}; expected {kind} ({ndim} axes)")


def require_shape(array: _core.Array | None, shape: Sequence[int], meaning: str) -> None:
    """``meaning``: the shape in letters, for the message: "[m, k]"."""
    if array is not None and list(array.shape) != list(shape):
        raise BadArgumentError(f"{array.name} has shape {list(array.shape)}; expected {meaning} = {list(shape)}")


def require_dtype(array: _core.Array | None, first: _core.Array) -> None:
    if array is not None and array.dtype != first.dtype:
        raise ArgumentTypeError(
            f"{array.name} has type {LONG_NAMES[array.dtype]}; expected {LONG_NAMES[first.dtype]} as {first.name} has"
        )


def require_dense_rows(array: _core.Array | None) -> None:
    """Of what is written: inputs are copied where they do not fit, outputs are not."""
    if array is not None and not array.has_dense_rows:
        raise BadArgumentError(
            f"{array.name} {list(array.shape)} has strides {list(array.strides)} (elements); expected rows of "
            "consecutive elements that do not overlap: strides [>= columns, 1]"
        )


def empty_like(array: Any, shape: Sequence[int], device: int = HOST) -> Any:
    """A new array of the same framework, type and device, uninitialised."""
    framework = framework_of(array)
    if framework == "torch":
        return array.new_empty(tuple(shape))
    if device != HOST:
        return empty_on_gpu(array, tuple(shape), device)
    import numpy as np

    if framework == "jax":
        return np.empty(tuple(shape), dtype=np.dtype(array.dtype))
    if isinstance(array, np.ndarray):
        return np.empty(tuple(shape), dtype=array.dtype)
    raise ArgumentTypeError(
        f"no output can be made for an array of class {type(array).__module__}.{type(array).__name__}: pass out"
    )


def like_framework(result: Any, array: Any) -> Any:
    """``result`` of ``empty_like(array)``, in the framework of ``array``."""
    if framework_of(array) == "jax" and framework_of(result) == "numpy":
        import jax.numpy as jnp

        return jnp.asarray(result)
    return result
