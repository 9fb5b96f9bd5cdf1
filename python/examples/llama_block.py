"""Two Llama-style layers, tensor parallel, and the same two unsharded: one training step of each gives the same loss.

python llama_block.py [RANKS]      ranks as threads of this process
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import flashoverlap as fo
import flashoverlap.torch as fot


class RmsNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, hidden: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [sequence, batch, hidden]; split by heads where the layers are.
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-1, -2) / self.head_size**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        out: Tensor = self.o_proj(mixed.permute(2, 0, 1, 3).flatten(-2))
        return out


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, hidden: int, intermediate: int, head_size: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(hidden)
        self.self_attn = Attention(hidden, head_size)
        self.post_attention_layernorm = RmsNorm(hidden)
        self.mlp = Mlp(hidden, intermediate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(hidden=64, intermediate=160, head_size=8) for _ in range(2)))


def make_data(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (16, 3, 64)  # [sequence, batch, hidden]
    return [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(steps)]


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The loss of each step. Every rank has the whole input, and so the whole loss."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for x, target in data:
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def train_sharded(comm: fo.Communicator, whole: Any, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    model = make_model()
    model.load_state_dict(whole)
    fot.replace_linear_layers(model, comm=comm)
    return train(model, data)


def main(ranks: int = 2, steps: int = 3) -> None:
    model = make_model()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = make_data(steps)
    sharded = fo.run_ranks(ranks, lambda comm: train_sharded(comm, whole, data))
    unsharded = train(model, data)
    for step, loss in enumerate(unsharded):
        print(f"step {step}: unsharded loss {loss:.6f}, on {ranks} ranks {sharded[0][step]:.6f}")
        for losses in sharded:
            if losses[step] != sharded[0][step] or abs(losses[step] - loss) > 1e-5 * loss:
                raise SystemExit(f"the losses differ: {losses} and {unsharded}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
