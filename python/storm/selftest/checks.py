"""Training loops of every kind. Each must give the same bits with and without STORM."""

from typing import Callable, Dict, NamedTuple, Optional

import torch
from torch import nn

from .._report import Report
from . import models
from .compare import Loop, gradients
from .models import batches, device_of


class Check(NamedTuple):
    """A model, a loop that trains it, and a condition that the report must meet afterwards."""

    make: Callable[[], nn.Module]
    loop: Loop
    holds: Optional[Callable[[Report], bool]] = None


def train(module, block):
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    seen = []
    for ids in batches(device_of(module), 5):
        with block:
            loss = module(ids)
        loss.backward()
        optimizer.step()
        seen.append((loss.detach(), gradients(module)))
    return seen


def backward_inside(module, block):
    seen = []
    with block:
        for ids in batches(device_of(module), 4):
            module(ids).backward()
            seen.append(gradients(module))
    return seen


def accumulation(module, block):
    for ids in batches(device_of(module), 6):
        with block:
            loss = module(ids) / 6
        loss.backward()
    return gradients(module)


def several_forwards(module, block):
    seen = []
    for _ in range(4):
        losses = []
        for ids in batches(device_of(module), 3):
            with block:
                losses.append(module(ids))
        (losses[0] + 2 * losses[1]).backward()
        losses[2].backward()
        seen.append(gradients(module))
    return seen


def graphs_side_by_side(module, block):
    """The backward pass of each step runs after the forward pass of the next."""
    seen, older = [], None
    for ids in batches(device_of(module), 6):
        with block:
            loss = module(ids)
        (loss if older is None else older).backward(retain_graph=True)
        older = loss
        seen.append(gradients(module))
    return seen


def retain_graph(module, block):
    seen = []
    for ids in batches(device_of(module), 4):
        with block:
            loss = module(ids)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        seen.append(gradients(module))
    return seen


def double_backward(module, block):
    seen = []
    for _ in range(4):
        x = torch.randn(8, 16, device=device_of(module), requires_grad=True)
        with block:
            y = module(x).square().mean()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (slope.square().sum() + y).backward()
        seen.append((x.grad, gradients(module)))
    return seen


def autocast(module, block):
    device = device_of(module)
    seen = []
    for ids in batches(device, 4):
        with block, torch.autocast(device.type, dtype=torch.bfloat16):
            loss = module(ids)
        loss.backward()
        seen.append(gradients(module))
    return seen


def no_grad(module, block):
    seen = []
    for ids in batches(device_of(module), 4):
        with block, torch.no_grad():
            seen.append(module(ids))
        with block:
            loss = module(ids)
        loss.backward()
        seen.append(gradients(module))
    return seen


def forward_alone(module, block):
    seen = []
    for ids in batches(device_of(module), 6):
        with block:
            seen.append(module(ids).detach())
        with block:
            loss = module(ids)
        loss.backward()
        seen.append(gradients(module))
    return seen


def lengths(*wanted):
    def loop(module, block):
        seen = []
        for length in wanted:
            ids = batches(device_of(module), 1, length)[0]
            with block:
                loss = module(ids)
            loss.backward()
            seen.append(gradients(module))
        return seen

    return loop


def branches(module, block):
    seen = []
    for _ in range(10):
        x = torch.randn(32, 64, device=device_of(module))
        with block:
            loss = module(x)
        loss.backward()
        seen.append(gradients(module))
    return seen


def other_orders(module, block):
    """The same tensors, needed in a different order."""
    seen = []
    for turn in range(8):
        x = torch.randn(16, 32, device=device_of(module))
        with block:
            losses = [layer(x).tanh().square().mean() for layer in module]
        for loss in losses if turn % 3 else reversed(losses):
            loss.backward()
        seen.append(gradients(module))
    return seen


def exceptions_in_forward(module, block):
    seen = []
    for ids in batches(device_of(module), 7):
        try:
            with block:
                loss = module(ids)
        except ArithmeticError:
            seen.append("failed")
            continue
        loss.backward()
        seen.append(gradients(module))
    return seen


def exceptions_in_backward(module, block):
    seen = []
    for turn, ids in enumerate(batches(device_of(module), 6)):
        with block:
            loss = module(ids)
            if turn in (0, 3):
                loss.register_hook(lambda gradient: 1 / 0)
        try:
            loss.backward()
        except ZeroDivisionError:
            seen.append("failed")
        seen.append(gradients(module))
    return seen


def unused_parts(module, block):
    """Half of the graph is never needed, but stays alive until the next step."""
    seen, unused = [], None
    for ids in batches(device_of(module), 6):
        with block:
            loss = module(ids)
            unused = module(ids)
        loss.backward()
        seen.append(gradients(module))
    del unused
    return seen


def read_twice(module, block):
    seen = []
    for _ in range(4):
        x = torch.randn(8, 32, device=device_of(module))
        with block:
            loss = models.Cube.apply(module(x)).mean()
        loss.backward()
        seen.append(gradients(module))
    return seen


def wide_rows(module, block):
    """Copies take longer than kernels, so each overlaps many of them."""
    seen = []
    for _ in range(4):
        x = torch.randn(16384 if torch.cuda.is_available() else 256, 512, device=device_of(module))
        with block:
            loss = module(x).square().mean()
        loss.backward()
        seen.append(gradients(module))
    return seen


def wide() -> nn.Module:
    layers = [(nn.LayerNorm(512), nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))] * 6
    return nn.Sequential(*[nn.Sequential(*layer) for layer in layers])


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Softplus())


def several() -> nn.Module:
    return nn.ModuleList(nn.Linear(32, 32) for _ in range(4))


CHECKS: Dict[str, Check] = {
    "training": Check(models.Mixed, train, lambda r: (r.recorded_steps, r.planned_steps) == (1, 3)),
    "large tensors": Check(wide, wide_rows, lambda r: r.planned_steps == 2),
    "backward inside the block": Check(models.Mixed, backward_inside, lambda r: r.planned_steps == 2),
    "accumulation": Check(models.Mixed, accumulation, lambda r: r.planned_steps == 4),
    "several forwards before a backward": Check(models.Mixed, several_forwards),
    "graphs side by side": Check(models.Mixed, graphs_side_by_side),
    "retain_graph": Check(models.Mixed, retain_graph),
    "double backward": Check(smooth, double_backward),
    "checkpoint": Check(models.Checkpointed, train),
    "checkpoint, reentrant": Check(models.CheckpointedReentrant, train),
    "checkpoint, backward inside": Check(models.CheckpointedReentrant, backward_inside),
    "autocast": Check(models.Mixed, autocast),
    "no_grad": Check(models.Mixed, no_grad),
    "forward without backward": Check(models.Mixed, forward_alone, lambda r: r.planned_steps >= 3),
    "steps that differ": Check(
        models.Mixed,
        lengths(16, 16, 9, 16, 9, 20, 16, 9, 20, 20, 5, 16),
        lambda r: r.recorded_steps == 4 and r.planned_steps >= 6,
    ),
    "steps that differ always": Check(
        models.Mixed, lengths(*range(4, 20)), lambda r: r.recorded_steps < 8
    ),
    "steps that differ in the middle": Check(models.Branches, branches),
    "orders that differ": Check(several, other_orders),
    "exception in forward": Check(models.Fails, exceptions_in_forward),
    "exception in backward": Check(models.Mixed, exceptions_in_backward),
    "unused parts of a graph": Check(models.Mixed, unused_parts),
    "saved tensors read twice": Check(lambda: nn.Linear(32, 32), read_twice),
}
