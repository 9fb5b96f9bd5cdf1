"""PyTorch: tensors, gradients, layers, process groups, torch.compile."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from conftest import d1_a, d1_b, d1_sum, poisoned

import flashoverlap as fo

torch = pytest.importorskip("torch", reason="torch is not installed")
import flashoverlap.torch as fot  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_each_type_strided_and_not(dtype):
    def on_rank(comm):
        a = torch.from_numpy(d1_a(comm.rank, 24, 4)).to(dtype)
        b = torch.from_numpy(d1_b(comm.rank, 16, 4)).to(dtype)
        out = torch.full((24, 20), float("nan"), dtype=dtype)
        outs = [
            fo.gemm_all_reduce(a, b, comm=comm),
            fo.gemm_all_reduce(a.t().contiguous().t(), b.repeat(2, 1)[::2], comm=comm)[:0],
            fo.gemm_all_reduce(a, b, comm=comm, out=out[:, :16]),
        ]
        assert out[:, 16:].isnan().all()
        assert all(one.dtype == dtype for one in outs)
        return outs[0], outs[2]

    for outs in fo.run_ranks(2, on_rank):
        for out in outs:
            np.testing.assert_array_equal(out.float().numpy(), d1_sum(2, 24, 16, 4))


def test_a_tensor_that_requires_a_gradient_is_not_taken_silently():
    def on_rank(comm):
        a = torch.zeros(4, 3, requires_grad=True)
        with pytest.raises(ValueError, match=r"a requires a gradient.*use flashoverlap\.torch"):
            fo.gemm_all_reduce(a, torch.zeros(2, 3), comm=comm)

    fo.run_ranks(2, on_rank)


def test_tensors_of_wrong_type_and_device():
    def on_rank(comm):
        good = torch.zeros(4, 3)
        with pytest.raises(TypeError, match="a has type float64; expected float32"):
            fo.gemm_all_reduce(good.double(), good, comm=comm)
        with pytest.raises(ValueError, match="a"):
            fo.gemm_all_reduce(torch.zeros(4, 3, device="meta"), good, comm=comm)

    fo.run_ranks(2, on_rank)


def whole_linear(x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


def gradients_of(out, *inputs):
    """By a fixed output gradient that differs in every element."""
    gradient = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).reshape(out.shape)
    return torch.autograd.grad(out, inputs, gradient)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("lead", [(5,), (6, 2), ()])
@pytest.mark.parametrize("kind", ["row", "column"])
def test_layers_equal_the_unsharded_one_forward_and_backward(ranks, lead, kind):
    linear = torch.nn.Linear(12, 18)
    x = torch.randn(*lead, 12, requires_grad=True)
    expected = linear(x)
    of_x, of_weight, of_bias = gradients_of(expected, x, linear.weight, linear.bias)

    def on_rank(comm):
        layer_class = fot.RowParallelLinear if kind == "row" else fot.ColumnParallelLinear
        layer = layer_class.from_linear(linear, comm)
        mine = x.detach().chunk(ranks, -1)[comm.rank] if kind == "row" else x.detach()
        mine = mine.clone().requires_grad_()
        out = layer(mine)
        part = expected if kind == "row" else expected.chunk(ranks, -1)[comm.rank]
        torch.testing.assert_close(out, part, rtol=1e-5, atol=1e-5)
        gradient = torch.cos(torch.arange(expected.numel())).reshape(expected.shape)
        if kind == "column":
            gradient = gradient.chunk(ranks, -1)[comm.rank]
        got = torch.autograd.grad(out, (mine, layer.weight, layer.bias), gradient)
        wanted_x = of_x.chunk(ranks, -1)[comm.rank] if kind == "row" else of_x
        torch.testing.assert_close(got[0], wanted_x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], layer.shard_of(of_weight, "weight"), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[2], layer.shard_of(of_bias, "bias"), rtol=1e-5, atol=1e-5)

    fo.run_ranks(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("lead", [(7,), (6, 2)])
@pytest.mark.parametrize("kind", ["row", "column"])
def test_sequence_parallel_layers(ranks, lead, kind):
    linear = torch.nn.Linear(12, 18)
    x = torch.randn(*lead, 12, requires_grad=True)
    expected = linear(x)
    of_x, of_weight, of_bias = gradients_of(expected, x, linear.weight, linear.bias)
    length = lead[0]

    def on_rank(comm):
        positions = slice(comm.rank * length // ranks, (comm.rank + 1) * length // ranks)
        gradient = torch.cos(torch.arange(expected.numel())).reshape(expected.shape)
        if kind == "row":
            layer = fot.RowParallelLinear.from_linear(linear, comm, sequence_parallel=True)
            mine = x.detach().chunk(ranks, -1)[comm.rank].clone().requires_grad_()
            out = layer(mine)
            part, gradient, wanted_x = expected[positions], gradient[positions], of_x.chunk(ranks, -1)[comm.rank]
        else:
            layer = fot.ColumnParallelLinear.from_linear(linear, comm, sequence_parallel=True)
            mine = x.detach()[positions].clone().requires_grad_()
            out = fot.all_gather_gemm(mine, layer.weight, layer.bias, comm=comm, positions=length)
            part, wanted_x = expected.chunk(ranks, -1)[comm.rank], of_x[positions]
            gradient = gradient.chunk(ranks, -1)[comm.rank]
            if length % ranks == 0:
                torch.testing.assert_close(layer(mine), out, rtol=0, atol=0)
        torch.testing.assert_close(out, part, rtol=1e-5, atol=1e-5)
        got = torch.autograd.grad(out, (mine, layer.weight, layer.bias), gradient)
        torch.testing.assert_close(got[0], wanted_x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], layer.shard_of(of_weight, "weight"), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[2], layer.shard_of(of_bias, "bias"), rtol=1e-5, atol=1e-5)

    fo.run_ranks(ranks, on_rank)


def test_layers_say_what_does_not_fit():
    def on_rank(comm):
        with pytest.raises(ValueError, match="in_features is 13; expected a multiple of the 2 ranks"):
            fot.RowParallelLinear(13, 4, comm=comm)
        with pytest.raises(ValueError, match="out_features is 5; expected a multiple of the 2 ranks"):
            fot.ColumnParallelLinear(4, 5, comm=comm)
        layer = fot.RowParallelLinear(8, 4, comm=comm, sequence_parallel=True)
        with pytest.raises(
            ValueError, match=rf"the input has shape \[3, 8\] on rank {comm.rank}; expected \[\.\.\., 4\]"
        ):
            layer(torch.zeros(3, 8))
        with pytest.raises(ValueError, match=r"the sequence has 3 positions .*expected a multiple of the 2 ranks"):
            layer(torch.zeros(3, 2, 4))
        assert "ranks=2, sequence_parallel=True" in repr(layer)

    fo.run_ranks(2, on_rank)


def test_state_dicts_of_whole_and_sharded_layers():
    linear = torch.nn.Linear(8, 6)
    whole = linear.state_dict()

    def on_rank(comm):
        layer = fot.ColumnParallelLinear(8, 6, comm=comm)
        assert [tuple(tensor.shape) for tensor in layer.state_dict().values()] == [(3, 8), (3,)]
        layer.load_state_dict(whole)
        again = fot.ColumnParallelLinear(8, 6, comm=comm)
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again.weight, linear.weight[3 * comm.rank : 3 * comm.rank + 3])
        with pytest.raises(RuntimeError, match="size mismatch"):
            layer.load_state_dict({"weight": torch.zeros(5, 8), "bias": torch.zeros(6)})

    fo.run_ranks(2, on_rank)
    assert [tuple(tensor.shape) for tensor in whole.values()] == [(6, 8), (6,)]


def example():
    path = Path(__file__).parents[1] / "examples" / "llama_block.py"
    spec = importlib.util.spec_from_file_location("llama_block", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_llama_layers_train_like_the_unsharded_ones(ranks):
    llama = example()
    model = llama.make_model()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = llama.make_data(3)
    sharded = fo.run_ranks(ranks, lambda comm: llama.train_sharded(comm, whole, data))
    losses = llama.train(model, data)
    assert all(one == sharded[0] for one in sharded)
    # Sums of 64 products of numbers near 1, in another order: a few float32 roundings.
    assert sharded[0] == pytest.approx(losses, rel=2e-6)
    assert losses[0] != losses[1]


def test_replace_linear_layers():
    llama = example()

    def on_rank(comm):
        model = llama.make_model()
        with pytest.raises(ValueError, match=r"plan\['\*no'\] matches no nn\.Linear"):
            fot.replace_linear_layers(model, {"*no": "row"}, comm=comm)
        with pytest.raises(ValueError, match="'diagonal'; expected 'column' or 'row'"):
            fot.replace_linear_layers(model, {"*q_proj": "diagonal"}, comm=comm)
        assert not any(isinstance(module, fot.RowParallelLinear) for module in model.modules())
        names = fot.replace_linear_layers(model, comm=comm)
        assert len(names) == 14
        assert isinstance(model[1].mlp.down_proj, fot.RowParallelLinear)
        assert isinstance(model[0].self_attn.q_proj, fot.ColumnParallelLinear)

    fo.run_ranks(2, on_rank)


needs_custom_op = pytest.mark.skipif(
    not hasattr(torch.library, "custom_op"), reason="PyTorch before 2.4 has no torch.library.custom_op"
)


def compiled_operators(layer, x):
    """Those of ours in the graphs of torch.compile, which must compute what the layer does without it."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = {"forward": [], "backward": []}

    def keep(which):
        def compiler(graph, _):
            graphs[which] += [str(node.target) for node in graph.graph.nodes]
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    wanted, out = layer(x), compiled(x)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    inputs = (x, *(parameter for parameter in layer.parameters() if parameter.requires_grad))
    for got, expected in zip(gradients_of(out, *inputs), gradients_of(wanted, *inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    return {
        which: sorted(target.split(".")[1] for target in targets if target.startswith("flashoverlap."))
        for which, targets in graphs.items()
    }


@needs_custom_op
@pytest.mark.parametrize(
    ("layer_class", "sequence_parallel", "forward", "backward"),
    [
        (fot.RowParallelLinear, False, {"gemm_all_reduce"}, set()),
        (fot.RowParallelLinear, True, {"gemm_reduce_scatter"}, {"all_gather_gemm"}),
        (fot.ColumnParallelLinear, False, set(), {"gemm_all_reduce"}),
        (fot.ColumnParallelLinear, True, {"all_gather_gemm"}, {"gemm_reduce_scatter", "all_gather"}),
    ],
)
def test_compile_keeps_the_operators_whole(layer_class, sequence_parallel, forward, backward):
    def on_rank(comm):
        layer = layer_class(8, 6, comm=comm, sequence_parallel=sequence_parallel)
        return compiled_operators(layer, torch.randn(5, 8, requires_grad=True))

    torch.compiler.reset()
    assert fo.run_ranks(1, on_rank) == [{"forward": sorted(forward), "backward": sorted(backward)}]


@needs_custom_op
@pytest.mark.parametrize("frozen", [False, True])
def test_compile_keeps_the_experts_whole(frozen):
    def on_rank(comm):
        module = fot.MoE(8, 6, 5, 2, comm=comm)
        module.w_up.requires_grad_(not frozen)
        return compiled_operators(module, torch.randn(3, 4, 8, requires_grad=True))

    torch.compiler.reset()
    assert fo.run_ranks(1, on_rank) == [{"forward": ["moe_layer"], "backward": ["moe_layer_backward"]}]


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="PyTorch before 2.4 has no torch.library.opcheck")
def test_custom_operators_are_registered_rightly():
    from flashoverlap.torch import moe, ops

    def on_rank(comm):
        number = ops.number_of(comm)
        a, b = torch.randn(5, 3), torch.randn(4, 3)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops.all_reduce_op, (a, b, None, number, "auto"), test_utils=tests)
        torch.library.opcheck(ops.reduce_scatter_op, (a, b, torch.ones(4), number, "auto"), test_utils=tests)
        torch.library.opcheck(ops.all_gather_gemm_op, (a, b, None, 5, number, "auto"), test_utils=tests)
        torch.library.opcheck(ops.all_gather_op, (a, 5, number), test_utils=tests)
        module = fot.MoE(8, 6, 5, 2, comm=comm)
        x, logits, call = torch.randn(3, 8), torch.randn(3, 5), torch.tensor(1)
        weights = (module.w_up.detach(), module.w_down.detach())
        torch.library.opcheck(moe.forward_op, (x, logits, *weights, module._number), test_utils=tests)
        for wants in ((True, True), (False, True), (True, False)):
            arguments = (torch.ones(3, 8), x, logits, *weights, call, module._number, *wants)
            torch.library.opcheck(moe.backward_op, arguments, test_utils=tests)

    fo.run_ranks(1, on_rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_moe_equals_dense_experts_forward_and_backward(ranks):
    hidden, intermediate, experts, top_k, tokens = 6, 8, 5, 2, 4
    router = torch.randn(experts, hidden, requires_grad=True)
    w_up = torch.randn(experts, 2 * intermediate, hidden, requires_grad=True)
    w_down = torch.randn(experts, hidden, intermediate, requires_grad=True)
    x = torch.randn(ranks, 2, tokens, hidden, requires_grad=True)

    scores = (x @ router.t()).softmax(-1)
    best, chosen = scores.topk(top_k)
    best = best / best.sum(-1, keepdim=True)
    gate, up = torch.einsum("rbth,eih->rbtei", x, w_up).chunk(2, -1)
    every = torch.einsum("rbtei,ehi->rbteh", torch.nn.functional.silu(gate) * up, w_down)
    expected = (every.gather(3, chosen[..., None].expand(*chosen.shape, hidden)) * best[..., None]).sum(3)
    wanted = gradients_of(expected, x, router, w_up, w_down)
    by = torch.cos(torch.arange(expected.numel(), dtype=torch.float32)).reshape(expected.shape)

    def on_rank(comm):
        r = comm.rank
        mine = slice(r * experts // ranks, (r + 1) * experts // ranks)
        module = fot.MoE(hidden, intermediate, experts, top_k, comm=comm)
        module.load_state_dict({"router": router, "w_up": w_up[mine], "w_down": w_down[mine]})
        here = x.detach()[r].clone().requires_grad_()
        out = module(here)
        torch.testing.assert_close(out, expected[r], rtol=1e-4, atol=1e-4)
        module(torch.zeros(2, hidden))  # The first call's gradients must not be those of this one.
        got = torch.autograd.grad(out, (here, module.router, module.w_up, module.w_down), by[r])
        for value, whole in ((got[0], wanted[0][r]), (got[2], wanted[2][mine]), (got[3], wanted[3][mine])):
            torch.testing.assert_close(value, whole, rtol=1e-3, atol=1e-3)
        with pytest.raises(ValueError, match=r"the input has shape \[3, 5\]"):
            module(torch.zeros(3, 5))
        return got[1]

    of_router = sum(fo.run_ranks(ranks, on_rank))
    torch.testing.assert_close(of_router, wanted[1], rtol=1e-3, atol=1e-3)


GROUP_PROGRAM = """
    import os, sys, numpy as np, torch, torch.distributed as dist
    sys.path.insert(0, os.environ["TESTS"])
    from conftest import d1_a, d1_b, d1_sum
    import flashoverlap as fo, flashoverlap.torch as fot
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = fot.communicator(num_threads=1)
    size, rank = comm.size, comm.rank
    assert comm.name == "process-group" and size == 3
    for m, n, k in [(64, 48, 16), (1, 1, 1), (0, 4, 4), (130, 70, 33)]:
        a, b = d1_a(rank, m, k), d1_b(rank, n, k)
        whole = d1_sum(size, m, n, k)
        for method in ("overlap", "serial"):
            np.testing.assert_array_equal(fo.gemm_all_reduce(a, b, comm=comm, tile=(16, 16), method=method), whole)
            part = fo.gemm_reduce_scatter(a, b, comm=comm, tile=(16, 16), method=method)
            np.testing.assert_array_equal(part, whole[rank * m // size : (rank + 1) * m // size])
        to = np.arange(m) % size
        rows = [d1_a(r, m, k) @ d1_b(r, n, k).T for r in range(size)]
        for method in ("signal", "tail-free"):
            again = fo.gemm_reduce_scatter(a, b, comm=comm, tile=(16, 16), method=method)
            np.testing.assert_array_equal(again, part)
        gathered = fo.all_gather_gemm(d1_a(rank, m + rank, k), b, comm=comm)
        np.testing.assert_array_equal(gathered, np.concatenate([d1_a(r, m + r, k) for r in range(size)]) @ b.T)
        out = fo.gemm_all_to_all(a, b, to, comm=comm)
        np.testing.assert_array_equal(out, np.concatenate([part[to == rank] for part in rows]))
    linear = torch.nn.Linear(12, 6)
    dist.broadcast(linear.weight.data, 0); dist.broadcast(linear.bias.data, 0)
    x = torch.cos(torch.arange(24.0)).reshape(2, 12)
    layer = fot.RowParallelLinear.from_linear(linear, comm)
    torch.testing.assert_close(layer(x.chunk(size, 1)[rank]), linear(x), rtol=1e-5, atol=1e-5)
    if rank:
        group = comm.subgroup([2, 1])
        assert (group.rank, group.size) == (2 - rank, 2)
        np.testing.assert_array_equal(
            fo.gemm_all_reduce(d1_a(rank, 8, 4), d1_b(rank, 8, 4), comm=group), d1_sum(3, 8, 8, 4) - d1_sum(1, 8, 8, 4)
        )
    comm.barrier()
    print("done", rank, flush=True)
    if rank == 2:
        os._exit(3)
    try:
        comm.timeout = 20
        fo.gemm_all_reduce(a, b, comm=comm)
    except fo.Error as error:
        print("heard", rank, type(error).__name__, str(error).replace(chr(10), " "), flush=True)
    os._exit(0)
"""


def test_ranks_of_a_process_group(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(3):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TESTS": str(Path(__file__).parent),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(GROUP_PROGRAM)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 3], "\n".join(outputs)
    for rank, output in enumerate(outputs):
        assert f"done {rank}" in output
    for rank in (0, 1):
        assert f"heard {rank}" in outputs[rank]
        assert "rank 2" in outputs[rank]


def test_communicator_without_a_process_group():
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        fot.communicator()


def test_numpy_and_torch_together():
    def on_rank(comm):
        out = poisoned((8, 6))
        fo.gemm_all_reduce(torch.from_numpy(d1_a(comm.rank, 8, 4)), d1_b(comm.rank, 6, 4), comm=comm, out=out)
        return out

    for out in fo.run_ranks(2, on_rank):
        np.testing.assert_array_equal(out, d1_sum(2, 8, 6, 4))


def test_a_moe_module_that_decides_itself_learns_the_same():
    def on_rank(comm):
        torch.manual_seed(comm.rank)
        always = fot.MoE(8, 6, 4, 2, comm=comm)
        decides = fot.MoE(8, 6, 4, 2, comm=comm, overlap_if="measured")
        decides.load_state_dict(always.state_dict())
        x = torch.randn(12, 8)
        for _ in range(10):
            results = []
            for module in (always, decides):
                module.zero_grad()
                out = module(x)
                out.square().sum().backward()
                results.append([out, *(parameter.grad for parameter in module.parameters())])
            assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        decides(x)
        assert decides.report["choice"].startswith(
            {"serial": "serial: ", "overlap": "overlapped: "}[decides.report["method"]]
        )

    fo.run_ranks(2, on_rank)
