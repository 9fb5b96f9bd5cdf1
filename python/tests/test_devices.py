"""Arrays on GPUs as far as no GPU is needed: where they are, how they are laid out, which stream a call goes into."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import d1_a, d1_b

import flashoverlap as fo
from flashoverlap import _arrays, _core, _devices

ADDRESS = 1 << 40


class OnGpu:
    """An array with a CUDA array interface; `fields` take the place of the usual ones."""

    def __init__(self, shape=(6, 4), device=0, **fields):
        self.shape = shape
        self._device = device
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f2", "data": (ADDRESS, False), "strides": None, "version": 3, **fields
        }  # fmt: skip

    def __dlpack_device__(self):
        return (2, self._device)


def test_cuda_array_interface_is_read():
    view = _arrays.view(OnGpu(device=1), "a", ndim=2, writable=True, device=1)
    assert (view.address, view.shape, view.strides, view.dtype) == (ADDRESS, [6, 4], [4, 1], "f16")
    assert (view.device, view.writable, view.is_dense) == (1, True, True)
    strided = _arrays.view(OnGpu(typestr="<f4", strides=(40, 4)), "a", ndim=2, device=0)
    assert (strided.strides, strided.dtype, strided.has_dense_rows, strided.is_dense) == ([10, 1], "f32", True, False)
    reads = _arrays.view(OnGpu(data=(ADDRESS, True)), "a", ndim=2, device=0)
    assert not reads.writable
    empty = _arrays.view(OnGpu(shape=(0, 4), data=(None, False)), "a", ndim=2, device=0)
    assert (empty.address, empty.shape) == (0, [0, 4])


@pytest.mark.parametrize(
    ("array", "device", "kind", "message"),
    [
        (OnGpu(device=1), 0, ValueError, r"x \(OnGpu\) is on device CUDA:1; .*on CUDA device 0, so expected an array"),
        (OnGpu(), -1, ValueError, r"is on device CUDA:0; the communicator computes on the CPU, .* in host memory"),
        (np.zeros((6, 4), np.float16), 0, ValueError, r"x \(ndarray\) is in host memory; .* on CUDA device 0, so"),
        (OnGpu(typestr="<f8"), 0, TypeError, "x has type '<f8' in its CUDA array interface; expected '<f4' or"),
        (OnGpu(mask=OnGpu()), 0, ValueError, r"x \(OnGpu\) is masked"),
        (OnGpu(strides=(9, 2)), 0, ValueError, r"x has strides \(9, 2\) bytes; expected multiples of 2"),
        (OnGpu(data=(ADDRESS, True)), 0, ValueError, r"x \[6, 4\] is read-only; expected a writable array"),
        (OnGpu(shape=(6,)), 0, ValueError, r"x has shape \[6\]; expected a matrix"),
    ],
)
def test_what_does_not_fit_says_so(array, device, kind, message):
    with pytest.raises(kind, match=message) as caught:
        _arrays.view(array, "x", ndim=2, writable=True, device=device)
    assert isinstance(caught.value, fo.Error)


def test_other_devices_have_names():
    for kind, text in {8: "Metal:3", 99: "DLPack device type 99:3"}.items():

        class Elsewhere(OnGpu):
            def __dlpack_device__(self, kind=kind):
                return (kind, 3)

        with pytest.raises(ValueError, match=f"is on device {text}"):
            _arrays.view(Elsewhere(), "x", ndim=2, device=0)


def test_the_compiled_half_looks_at_devices_too():
    """An address on a GPU never reaches the operators of the CPU."""

    def on_rank(comm):
        operator = fo.GemmAllReduce(comm, m=6, n=5, k=4)
        on_gpu = _core.Array.from_address(ADDRESS, [6, 4], [4, 1], "f32", "a", False, 3)
        b = _arrays.view(np.zeros((5, 4), np.float32), "b", ndim=2)
        out = _arrays.view(np.zeros((6, 5), np.float32), "out", ndim=2, writable=True)
        with pytest.raises(ValueError, match=r"a \[6, 4\] f32 is on CUDA device 3; this communicator computes in host"):
            operator._core.run(on_gpu, b, out, None, "none", None, None, None, 1e-6, "overlap", 0, None)

    fo.run_ranks(1, on_rank)


def test_the_compiled_half_of_the_moe_layer_looks_too():
    def on_rank(comm):
        layer = fo.MoeLayer(comm, hidden=4, intermediate=4, num_experts=1, gated=False)
        x, out = (_arrays.view(np.zeros((6, 4), np.float32), name, ndim=2, writable=True) for name in ("x", "out"))
        weights = _core.Array.from_address(ADDRESS, [1, 4, 4], [16, 4, 1], "f32", "w_up", False, 3)
        routed = fo.routing([[0]] * 6, [[1.0]] * 6, 1)
        message = r"w_up \[1, 4, 4\] f32 is on CUDA device 3; this communicator computes in host"
        for call in (
            lambda: layer._core.forward(x, routed, weights, weights, out, "overlap", 0, None),
            lambda: layer._core.backward(x, weights, weights, out, None, None, None, "overlap"),
            lambda: layer._core.measure_parts(weights, weights),
        ):
            with pytest.raises(ValueError, match=message):
                call()

    fo.run_ranks(1, on_rank)


def test_the_moe_layer_on_the_cpu_has_no_stream():
    def on_rank(comm):
        layer = fo.MoeLayer(comm, hidden=4, intermediate=4, num_experts=1, gated=False)
        x, weights = np.zeros((6, 4), np.float32), np.zeros((1, 4, 4), np.float32)
        with pytest.raises(ValueError, match="calls on the CPU have none"):
            layer(x, fo.routing([[0]] * 6, [[1.0]] * 6, 1), weights, weights, stream=TorchStream())
        with pytest.raises(ValueError, match=r"x \(OnGpu\) is on device CUDA:0; the communicator computes on the CPU"):
            layer(OnGpu(typestr="<f4"), fo.routing([[0]] * 6, [[1.0]] * 6, 1), weights, weights)

    fo.run_ranks(1, on_rank)


def test_what_the_host_needs_of_a_gpu_is_copied():
    here = np.zeros((2, 3), np.float32)
    assert _devices.on_host(here) is here
    with pytest.raises(fo.UnsupportedError, match="an array of test_devices on a GPU is not copied to the host"):
        _devices.on_host(OnGpu())


class TorchStream:
    cuda_stream = 77


class CupyStream:
    ptr = 78


class AnyStream:
    def __cuda_stream__(self):
        return (0, 79)


def test_streams_of_every_kind():
    handles = [_devices.stream_of(one, OnGpu(), 0) for one in (TorchStream(), CupyStream(), AnyStream(), 80)]
    assert handles == [77, 78, 79, 80]
    assert _devices.stream_of(None, OnGpu(), 0) == 0  # The framework has none.
    assert _devices.stream_of(None, np.zeros(1), -1) == 0
    for wrong in ("default", True, -1):
        with pytest.raises(ValueError, match=r"stream is .*; expected None, a cudaStream_t as an integer"):
            _devices.stream_of(wrong, OnGpu(), 0)
    with pytest.raises(ValueError, match="calls on the CPU have none"):
        _devices.stream_of(TorchStream(), np.zeros(1), -1)


def test_outputs_that_nobody_can_make():
    with pytest.raises(fo.UnsupportedError, match=r"no output can be made on CUDA device 1: .*; pass out"):
        _arrays.empty_like(OnGpu(), (2, 2), 1)


def test_ranks_know_whether_they_are_on_a_gpu():
    assert fo.run_ranks(2, lambda comm: comm.device) == [None, None]
    for options, message in (
        ({"devices": [0]}, "devices has 1 entries; expected one for each of the 2 ranks"),
        ({"devices": [0, 0], "transport": "pigeon"}, "transport is 'pigeon'; expected 'peer', 'copy-engine' or 'nccl'"),
    ):
        with pytest.raises(ValueError, match=message):
            fo.run_ranks(2, print, **options)
    with pytest.raises(fo.UnsupportedError, match="NCCL cannot be paced"):
        fo.run_ranks(2, print, devices=[0, 0], transport="nccl", bandwidth_gbps=5)


@pytest.mark.skipif(_core.built_with_cuda, reason="built with CUDA")
def test_a_package_without_cuda_says_how_to_get_one():
    assert _core.gpu_count() == 0
    message = r"built without CUDA; build it with pip install \. --config-settings=cmake\.define\.FLASHOVERLAP_CUDA=ON"
    with pytest.raises(fo.UnsupportedError, match=message):
        fo.run_ranks(2, print, devices=[0, 1])
    with pytest.raises(fo.UnsupportedError, match=message):
        fo.Communicator.from_environment(device=0)


def test_the_cpu_still_computes():
    out = fo.run_ranks(2, lambda comm: fo.gemm_all_reduce(d1_a(0, 4, 3), d1_b(0, 5, 3), comm=comm))
    np.testing.assert_array_equal(out[0], 2 * (d1_a(0, 4, 3) @ d1_b(0, 5, 3).T))
