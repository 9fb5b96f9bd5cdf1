"""Where arrays are, and the streams of frameworks. A device is a CUDA device's index, or -1: host memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from . import _core
from .errors import ArgumentTypeError, BadArgumentError, UnsupportedError

HOST = -1

# DLPack's numbers.
_HOST_KINDS = (1, 3)  # kDLCPU, kDLCUDAHost (pinned host memory)
_CUDA_KINDS = (2, 13)  # kDLCUDA, kDLCUDAManaged
_NAMES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm"}
_TYPES = {"<f4": "f32", "<f2": "f16"}


def framework_of(array: Any) -> str:
    """The top-level module of the array's class: "numpy", "torch", "jax", "cupy", …"""
    module = type(array).__module__.partition(".")[0]
    return "jax" if module == "jaxlib" else module


def name_of(device: int) -> str:
    return "the CPU" if device == HOST else f"CUDA device {device}"


def require_device(array: Any, name: str, device: int) -> None:
    """Raises BadArgumentError, with both places, for an array that is not where the communicator computes."""
    place, found = _place_of(array)
    if found == device:
        return
    expected = "an array in host memory" if device == HOST else "an array there"
    raise BadArgumentError(
        f"{name} ({type(array).__name__}) is {place}; the communicator computes on {name_of(device)}, so expected "
        f"{expected}"
    )


def _place_of(array: Any) -> tuple[str, int | None]:
    """In words, and as a device where it is one that the library knows."""
    device_of = getattr(array, "__dlpack_device__", None)
    if device_of is not None:
        kind, index = (int(part) for part in device_of())
        if kind in _HOST_KINDS:
            return "in host memory", HOST
        if kind in _CUDA_KINDS:
            return f"on device CUDA:{index}", index
        return f"on device {_NAMES.get(kind, f'DLPack device type {kind}')}:{index}", None
    if hasattr(array, "__cuda_array_interface__"):
        device = getattr(array, "device", None)  # CuPy and Numba say it here; the interface itself does not.
        index = int(getattr(device, "id", 0) if device is not None else 0)
        return f"in CUDA memory of device {index}", index
    return "in host memory", HOST


def view_cuda_interface(array: Any, name: str, device: int, writable: bool) -> _core.Array:
    """From ``__cuda_array_interface__``, version 2 or 3."""
    fields = array.__cuda_array_interface__
    address, read_only = fields["data"]
    if fields["typestr"] not in _TYPES:
        raise ArgumentTypeError(
            f"{name} has type {fields['typestr']!r} in its CUDA array interface; expected '<f4' or '<f2' (bfloat16: "
            "through DLPack)"
        )
    if fields.get("mask") is not None:
        raise BadArgumentError(f"{name} ({type(array).__name__}) is masked; expected an array without a mask")
    if writable and read_only:
        raise BadArgumentError(f"{name} {list(fields['shape'])} is read-only; expected a writable array")
    size = int(fields["typestr"][2:])
    shape = [int(extent) for extent in fields["shape"]]
    strides = _element_strides(fields.get("strides"), shape, size, name)
    return _core.Array.from_address(address or 0, shape, strides, _TYPES[fields["typestr"]], name, writable, device)


def _element_strides(strides: Any, shape: list[int], size: int, name: str) -> list[int]:
    if strides is not None:
        if any(stride % size for stride in strides):
            raise BadArgumentError(f"{name} has strides {tuple(strides)} bytes; expected multiples of {size}")
        return [stride // size for stride in strides]
    dense, step = [], 1
    for extent in reversed(shape):
        dense.append(step)
        step *= extent
    return dense[::-1]


def stream_of(stream: Any, array: Any, device: int) -> int:
    """The cudaStream_t that a call is put into: ``stream``, or the current one of the array's framework.

    stream: an integer, or an object of PyTorch (``cuda_stream``), CuPy (``ptr``) or with ``__cuda_stream__``.
    """
    if device == HOST:
        if stream is not None:
            raise BadArgumentError(f"stream is {stream!r}; calls on the CPU have none, expected None")
        return 0
    if stream is None:
        return _current_stream(array, device)
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(handle)
    raise BadArgumentError(
        f"stream is {stream!r}; expected None, a cudaStream_t as an integer, or a stream of PyTorch or CuPy"
    )


def _current_stream(array: Any, device: int) -> int:
    framework = framework_of(array)
    if framework == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if framework == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0  # The legacy default stream, which waits for the others that were not made to ignore it.


def hold(arrays: Iterable[Any], stream: int, device: int) -> None:
    """Keeps the memory of PyTorch's tensors from being used again before ``stream`` has come past the call.

    For its current stream PyTorch does so itself. CuPy hands memory out by stream, too: with a stream of your own keep
    the arrays until it is done.
    """
    for array in arrays:
        if framework_of(array) == "torch" and array.is_cuda:
            torch = sys.modules["torch"]
            array.record_stream(torch.cuda.ExternalStream(stream, device=device))


def empty_on_gpu(array: Any, shape: tuple[int, ...], device: int) -> Any:
    """A new array of CuPy. (PyTorch's tensors make their own.)"""
    framework = framework_of(array)
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return cupy.empty(shape, dtype=array.dtype)
    what = "JAX's arrays cannot be written to" if framework == "jax" else f"{framework} makes none here"
    raise UnsupportedError(f"no output can be made on {name_of(device)}: {what}; pass out, of PyTorch or CuPy")


def on_host(array: Any) -> Any:
    """``array`` itself where it is in host memory; otherwise a copy there, for which the host waits."""
    if _place_of(array)[1] == HOST:
        return array
    framework = framework_of(array)
    if framework == "torch":
        return array.detach().cpu()
    if framework == "cupy":
        return sys.modules["cupy"].asnumpy(array)
    if framework == "jax":
        return sys.modules["numpy"].asarray(array)
    raise UnsupportedError(f"an array of {framework} on a GPU is not copied to the host here; pass one of the host's")
