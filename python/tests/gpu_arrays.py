"""The package on a GPU: PyTorch's and, where it is installed, CuPy's arrays against PyTorch's own sums in float32.

Not collected by pytest: `./dev gpu-test` runs it where the package was built with CUDA. Needs one GPU, which then
stands for two ranks; with more, each rank has its own. Says "skipped: …" where something is missing.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import socket
import sys

SMS_EACH = 48  # Of an H200's 132, 16 of which exchange.


def reason_to_skip() -> str:
    if importlib.util.find_spec("flashoverlap") is None:
        return "the package is not installed"
    from flashoverlap import _core

    if not _core.built_with_cuda:
        return "the package was built without CUDA"
    if _core.gpu_count() == 0:
        return "no CUDA device"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def matrices(rank: int, m: int, n: int, k: int, device: int):
    """Small integers: their sums are exact in float16."""
    import torch

    generator = torch.Generator().manual_seed(7 + rank)
    return [
        torch.randint(-2, 3, (rows, k), generator=generator).to(device=f"cuda:{device}", dtype=torch.float16)
        for rows in (m, n)
    ]


def expected_sum(ranks: int, m: int, n: int, k: int):
    return sum(a.float().cpu() @ b.float().cpu().t() for a, b in (matrices(r, m, n, k, 0) for r in range(ranks)))


def check_torch(comm, m: int, n: int, k: int, whole) -> None:
    import torch

    import flashoverlap as fo

    device = comm.device
    torch.cuda.set_device(device)
    a, b = matrices(comm.rank, m, n, k, device)
    bias = torch.ones(n, dtype=torch.float16, device=a.device)
    for method in ("overlap", "serial"):
        out = fo.gemm_all_reduce(a, b, comm=comm, method=method, bias=bias)
        assert out.device == a.device
        torch.testing.assert_close(out.float().cpu(), whole + 1, rtol=0, atol=0)
        part = fo.gemm_reduce_scatter(a, b, comm=comm, method=method)
        mine = slice(comm.rank * m // comm.size, (comm.rank + 1) * m // comm.size)
        torch.testing.assert_close(part.float().cpu(), whole[mine], rtol=0, atol=0)
    # On a stream of its own, with inputs that go at once.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    out = fo.gemm_all_reduce(a.clone(), b.clone(), comm=comm, stream=stream)
    stream.synchronize()
    torch.testing.assert_close(out.float().cpu(), whole, rtol=0, atol=0)


def check_errors(comm, m: int, n: int, k: int) -> None:
    import flashoverlap as fo

    a, b = matrices(comm.rank, m, n, k, comm.device)
    for wrong, message in ((a.cpu(), "in host memory"), (a.t().contiguous().t(), "nothing is packed")):
        try:
            fo.gemm_all_reduce(wrong, b, comm=comm)
        except ValueError as error:
            if message not in str(error):
                raise
        else:
            raise AssertionError(f"no error that says {message!r}")


MOE = {"hidden": 64, "intermediate": 96, "experts": 5, "top_k": 2}


def moe_weights():
    """router [E, H], up [E, 2 I, H], down [E, H, I]; the first E elements of a token are its logits, but for noise."""
    import torch

    generator = torch.Generator().manual_seed(3)
    hidden, intermediate, experts = MOE["hidden"], MOE["intermediate"], MOE["experts"]
    router = torch.eye(experts, hidden) + 0.01 * torch.randn((experts, hidden), generator=generator)
    up = torch.randn((experts, 2 * intermediate, hidden), generator=generator) / hidden**0.5
    down = torch.randn((experts, hidden, intermediate), generator=generator) / intermediate**0.5
    return [weights.half() for weights in (router, up, down)]


def moe_tokens(rank: int):
    """Tokens, each with two experts far above the others, and gradients of their results."""
    import torch

    generator = torch.Generator().manual_seed(20 + rank)
    tokens, experts = 40 + 7 * rank, MOE["experts"]
    x, gradient = (0.2 * torch.randn((tokens, MOE["hidden"]), generator=generator) for _ in range(2))
    wanted = torch.rand((tokens, experts), generator=generator).argsort(1)
    x[:, :experts] += (wanted == 0) * 3.0 + (wanted == 1) * 2.0
    return x.half(), gradient.half()


def moe_expected(x, router, up, down):
    """The layer in float32, token by token."""
    import torch

    weights, ids = torch.softmax(x @ router.t(), 1).topk(MOE["top_k"])
    weights = weights / weights.sum(1, keepdim=True)
    rows = []
    for token in range(x.shape[0]):
        result = torch.zeros_like(x[token])
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, value = (up[expert] @ x[token]).chunk(2)
            result = result + weight * (down[expert] @ (torch.nn.functional.silu(gate) * value))
        rows.append(result)
    return torch.stack(rows)


def check_moe(comm, transport: str) -> None:
    """Results, and gradients of tokens, router and experts' weights, of the module on GPUs."""
    import torch

    import flashoverlap.torch as fot

    torch.cuda.set_device(comm.device)
    weights = [matrix.float().requires_grad_() for matrix in moe_weights()]
    results = []
    for rank in range(comm.size):
        x, gradient = (matrix.float() for matrix in moe_tokens(rank))
        x.requires_grad_()
        own_router = weights[0].detach().clone().requires_grad_()  # Each rank has a gradient of its own tokens.
        out = moe_expected(x, own_router, *weights[1:])
        out.backward(gradient)
        results.append((out.detach(), x.grad, own_router.grad))

    module = fot.MoE(
        MOE["hidden"], MOE["intermediate"], MOE["experts"], MOE["top_k"],
        comm=comm, transport=transport, dtype=torch.float16,
    )  # fmt: skip
    first = module._runner.layer.first_expert
    mine = slice(first, first + module._runner.layer.local_experts)
    with torch.no_grad():
        for parameter, values in zip(
            module.parameters(), (moe_weights()[0], *(w[mine] for w in moe_weights()[1:])), strict=True
        ):
            parameter.copy_(values)
    x, gradient = (matrix.cuda(comm.device) for matrix in moe_tokens(comm.rank))
    x.requires_grad_()
    for _ in range(2):  # The second call reuses what the first has made.
        x.grad = None
        module.zero_grad()
        out = module(x)
        out.backward(gradient)
    expected = (*results[comm.rank], weights[1].grad[mine], weights[2].grad[mine])
    got = (out.detach(), x.grad, *(parameter.grad for parameter in module.parameters()))
    for name, one, other in zip(("out", "x", "router", "w_up", "w_down"), got, expected, strict=True):
        assert one.device == x.device
        torch.testing.assert_close(
            one.float().cpu(),
            other,
            rtol=0,
            atol=0.02 * float(other.abs().max()),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check_cupy(comm, m: int, n: int, k: int, whole) -> None:
    import cupy

    import flashoverlap as fo

    with cupy.cuda.Device(comm.device):
        a, b = (cupy.asarray(matrix) for matrix in matrices(comm.rank, m, n, k, comm.device))
        out = fo.gemm_all_reduce(a, b, comm=comm)
        assert isinstance(out, cupy.ndarray)
        assert (cupy.asnumpy(out).astype("float32") == whole.numpy()).all()


def main() -> int:
    reason = reason_to_skip()
    if reason:
        print(f"skipped: {reason}")
        return 0
    import flashoverlap as fo
    from flashoverlap import _core

    ranks, (m, n, k) = 2, (512, 384, 256)
    alone = _core.gpu_count() == 1
    options = {"devices": [0, 0], "compute_sms": SMS_EACH} if alone else {"devices": [0, 1]}
    whole = expected_sum(ranks, m, n, k)
    checks = [(check_torch, (m, n, k, whole))]
    if importlib.util.find_spec("cupy") is None:
        print("skipped: CuPy is not installed")
    else:
        checks.append((check_cupy, (m, n, k, whole)))
    checks.append((check_errors, (m, n, k)))
    checks += [(check_moe, (transport,)) for transport in ("collective", "put")]
    for check, arguments in checks:
        for transport in ("peer", "copy-engine"):
            function = functools.partial(call_with_rank, check, arguments)
            fo.run_ranks(ranks, function, transport=transport, **options)
            print(f"passed: {check.__name__} on {options['devices']} by {transport}")
    for transport in ("peer", "copy-engine"):
        run_processes(ranks, transport, (m, n, k))
        print(f"passed: {ranks} processes by {transport}")
    return 0


def call_with_rank(check, arguments, comm) -> None:
    check(comm, *arguments)


def run_processes(ranks: int, transport: str, shape: tuple[int, int, int]) -> None:
    """As torchrun would start them; on one GPU where there are not as many."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run_process, args=(rank, ranks, port, transport, shape)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise AssertionError(f"processes ended with {codes}")


def run_process(rank: int, ranks: int, port: int, transport: str, shape: tuple[int, int, int]) -> None:
    import torch.distributed as dist

    import flashoverlap.torch
    from flashoverlap import _core

    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    device = rank if _core.gpu_count() >= ranks else 0
    comm = flashoverlap.torch.communicator(device=device, transport=transport)
    check_torch(comm, *shape, expected_sum(ranks, *shape))
    for moe_transport in ("collective", "put"):
        check_moe(comm, moe_transport)
    check_errors(comm, *shape)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
