"""Arrays of any framework as views for the compiled half, without copies and without importing a framework."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import _core
from .errors import ArgumentTypeError, BadArgumentError, UnsupportedError

_CPU_DEVICES = (1, 3)  # DLPack: kDLCPU, kDLCUDAHost (pinned host memory)
_DEVICE_NAMES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed"}
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


def framework_of(array: Any) -> str:
    """The top-level module of the array's class: "numpy", "torch", "jax", "cupy", …"""
    module = type(array).__module__.partition(".")[0]
    return "jax" if module == "jaxlib" else module


def _require_host_memory(array: Any, name: str) -> None:
    device_of = getattr(array, "__dlpack_device__", None)
    if device_of is not None and framework_of(array) != "numpy":
        kind, index = (int(part) for part in device_of())
        if kind not in _CPU_DEVICES:
            label = _DEVICE_NAMES.get(kind, f"DLPack device type {kind}")
            raise BadArgumentError(
                f"{name} is on device {label}:{index}; the communicator computes on the CPU, so expected an array "
                "in host memory (this build of the Python package has no GPU communicator)"
            )
    elif hasattr(array, "__cuda_array_interface__"):
        raise BadArgumentError(
            f"{name} ({type(array).__name__}) is in CUDA memory; the communicator computes on the CPU, so expected "
            "an array in host memory"
        )


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
    return _core.Array.from_address(address, list(array.shape), strides, _NAMES[dtype], name, writable)


def _view_of_dlpack(array: Any, name: str, writable: bool) -> _core.Array:
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
    try:
        if writable:
            return _core.Array.from_writable_dlpack(array, name)
        return _core.Array.from_dlpack(array, name)
    except TypeError as error:  # What its own class refuses comes so too.
        what = "read-only, or cannot be shared" if writable else "not to be shared"
        raise BadArgumentError(f"{name} ({type(array).__name__}) is {what} through DLPack") from error
    except (BufferError, RuntimeError) as error:
        raise BadArgumentError(f"{name} ({type(array).__name__}) cannot be shared through DLPack: {error}") from error


def dtype_text(array: Any) -> str:
    dtype = getattr(array, "dtype", "?")
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


def view(array: Any, name: str, *, ndim: int, writable: bool = False) -> _core.Array:
    """Where ``array`` is. The caller keeps ``array`` alive as long as the view is used."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        _require_ndim(array.shape, name, ndim)
        return _view_of_numpy(array, name, writable)
    if not hasattr(array, "__dlpack__") and not hasattr(array, "__cuda_array_interface__"):
        raise ArgumentTypeError(
            f"{name} is a {type(array).__name__}; expected an array (NumPy, PyTorch, JAX, or anything with __dlpack__)"
        )
    _require_host_memory(array, name)
    if not hasattr(array, "__dlpack__"):
        raise UnsupportedError(f"{name} ({type(array).__name__}) has no __dlpack__")
    shape = getattr(array, "shape", None)
    if shape is not None:
        _require_ndim(shape, name, ndim)
    made = _view_of_dlpack(array, name, writable)
    _require_ndim(made.shape, name, ndim)
    return made


def optional_view(array: Any, name: str, *, ndim: int, writable: bool = False) -> _core.Array | None:
    return None if array is None else view(array, name, ndim=ndim, writable=writable)


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


def empty_like(array: Any, shape: Sequence[int]) -> Any:
    """A new array of the same framework, type and device, uninitialised."""
    framework = framework_of(array)
    if framework == "torch":
        return array.new_empty(tuple(shape))
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
    if framework_of(array) == "jax":
        import jax.numpy as jnp

        return jnp.asarray(result)
    return result
