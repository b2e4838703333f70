"""Small models that save tensors in different ways."""

from typing import List

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mixed(nn.Module):
    """Convolution, attention, norms, dropout, views, an in-place op and a tied weight."""

    def __init__(self, width: int = 32, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                    "dropout": nn.Dropout(0.1),
                }
            )
            for _ in range(layers)
        )

    def block(self, layer: nn.ModuleDict, x: Tensor) -> Tensor:  # (B, T, C)
        q, k, v = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + layer["out"](y.transpose(1, 2).flatten(2))
        return x + layer["down"](layer["dropout"](nn.functional.relu_(layer["up"](x))))

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> ()
        x = self.embedding(ids)
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = self.block(layer, x)
        logits = x @ self.embedding.weight.t()  # (B, T, V)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Checkpointed(Mixed):
    """Recomputes every layer in the backward pass."""

    reentrant = False

    def block(self, layer: nn.ModuleDict, x: Tensor) -> Tensor:
        return checkpoint(super().block, layer, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    """The same with PyTorch's older, reentrant checkpoints."""

    reentrant = True


class Fails(Mixed):
    """Raises at the end of its first and fourth forward pass."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        loss = super().forward(ids)
        self.calls += 1
        if self.calls in (1, 4):
            raise ArithmeticError("on purpose")
        return loss


class Branches(nn.Module):
    """Takes different branches in different calls, after a common start."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.common = nn.Linear(64, 64)
        self.ways = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 96), nn.Linear(64, 64)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.common(self.common(x).relu()).sigmoid()
        way = [0, 0, 1, 0, 1, 2, 2, 1, 0, 2][self.calls]
        self.calls += 1
        for _ in range(way):
            x = self.common(x).tanh()
        return self.ways[way](x).exp().mean()


class Cube(torch.autograd.Function):
    """Reads its saved tensors twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        _, square = ctx.saved_tensors
        return gradient * (2 * square + x * x)


def batches(device: torch.device, count: int, length: int = 16) -> List[Tensor]:
    """The same random tokens each time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (4, length), generator=generator).to(device) for _ in range(count)]


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
