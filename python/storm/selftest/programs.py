"""Random autograd programs, with the same gradients with STORM as without, bit for bit.

A program is a function of its seed. It combines valid but error-prone uses of PyTorch: views,
writes in place, and tensors that share memory but not a version counter, so PyTorch does not notice
when one is written through another. A program may overwrite what was saved before. It is then
refused with and without STORM. If PyTorch does not notice the write, the program never uses what
was saved before it. So the saved bytes are the same as the bytes at the time of use, and
``save_on_cpu`` must agree as well.
"""

import contextlib
import copy
from random import Random
from typing import Any, Callable, ContextManager, Dict, List, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .compare import SETTINGS, assert_same, gradients, make_block

#: Rows and columns of every value.
ROWS, COLUMNS = 24, 32

#: Enough for one recorded step and two planned ones.
STEPS = 3


def _recurrent(kind: int) -> nn.Module:
    half = COLUMNS // 2
    return [
        lambda: nn.GRU(COLUMNS, COLUMNS),
        lambda: nn.GRU(COLUMNS, half, num_layers=2, bidirectional=True),
        lambda: nn.LSTM(COLUMNS, COLUMNS, proj_size=half, bidirectional=True),
        lambda: nn.LSTM(COLUMNS, COLUMNS, num_layers=2),
        lambda: nn.RNN(COLUMNS, COLUMNS),
        lambda: nn.GRUCell(COLUMNS, COLUMNS),
        lambda: nn.LSTMCell(COLUMNS, COLUMNS),
    ][kind]()


class Parts(nn.Module):
    """The parameters of the programs."""

    def __init__(self, kind: int):
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(ROWS, COLUMNS) for _ in range(3))
        self.square = nn.Parameter(torch.randn(COLUMNS, COLUMNS) / COLUMNS**0.5)
        self.packed = nn.Linear(COLUMNS, 3 * COLUMNS)
        self.recurrent = _recurrent(kind)


class Doubled(torch.autograd.Function):
    """Writes its input in place, marks it dirty, and saves the result."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class Squared(torch.autograd.Function):
    """Saves its input and a part of it with a separate version counter."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.data[1:])
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        x, part = ctx.saved_tensors
        return 2 * torch.cat([x[:1], part]) * gradient


class Run:
    """One run of a program: its values so far, all of shape (ROWS, COLUMNS)."""

    def __init__(self, parts: Parts, random: Random, values: List[Tensor]):
        self.parts, self.random, self.values = parts, random, values
        # Unused results: what was saved for them is never needed.
        self.unused: List[Tensor] = []

    def value(self) -> Tensor:
        return self.random.choice(self.values)

    def scale(self) -> Tensor:
        return self.random.choice(list(self.parts.scales))

    def fresh(self) -> Tensor:
        """A new value that nothing has saved."""
        return self.value() * 1

    def write(self, x: Tensor) -> Tensor:
        """Writes in place, visibly to PyTorch, up to three times."""
        for kind in self.random.choices(range(5), k=self.random.randrange(3)):
            if kind == 0:
                x.add_(0.5)
            elif kind == 1:
                x.mul_(0.9)
            elif kind == 2:
                torch._foreach_mul_([x], 1.1)
            elif kind == 3:
                x[..., : x.shape[-1] // 2].mul_(1.5)
            else:
                with torch.no_grad():
                    x[0].mul_(0.5)
        # Some of these save their result, so they come last.
        return self.random.choice([x.sigmoid_, x.tanh_, lambda: x.sub_(0.5)])()

    def write_unseen(self, x: Tensor) -> None:
        """Writes in place, through memory with another version counter, or with none."""
        same = x.detach()
        kind = self.random.randrange(5)
        if kind == 0:
            x.data.add_(0.25)
        elif kind == 1:
            torch.from_dlpack(same).mul_(1.25)
        elif kind == 2:
            alias = torch.empty(0, dtype=x.dtype, device=x.device)
            alias.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride()).sub_(0.25)
        elif kind == 3:
            torch.unsafe_split(same, x.shape[0])[0].mul_(1.5)
        elif x.device.type == "cpu":
            same.numpy()[...] += 0.125
        else:
            with torch.autograd._unsafe_preserve_version_counter(same):
                same.add_(0.125)


def pointwise(run: Run) -> Tensor:
    x = run.value()
    kind = run.random.randrange(6)
    if kind == 0:
        return x.tanh() * x
    if kind == 1:
        return F.gelu(x)
    if kind == 2:
        return x.softmax(-1)
    if kind == 3:
        return F.layer_norm(x, (COLUMNS,))
    if kind == 4:
        return (x - run.value()).square()
    return x.clamp(-4, 4).exp()


def product(run: Run) -> Tensor:
    x = run.value()
    return x * run.scale() if run.random.random() < 0.5 else x @ run.parts.square


def several_readers(run: Run) -> Tensor:
    """One value, saved several times, as in the projections of attention."""
    x = run.value()
    return torch.tanh(x * run.scale()) + (x @ run.parts.square) * x + x.detach() * run.scale()


def attention(run: Run) -> Tensor:
    """Three views of one storage."""
    packed = run.parts.packed(run.value()).view(1, ROWS, 3, 4, -1)  # (1, T, 3, H, D)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=run.random.random() < 0.5)
    return y.transpose(1, 2).flatten(2)[0]


def views(run: Run) -> Tensor:
    x = run.fresh()
    parts = [x.chunk(4, 1), x.split(COLUMNS // 2, 1), x.t().chunk(2), x.unbind(1)][run.random.randrange(4)]
    parts = [part.sin() * part for part in parts]
    return torch.stack(parts, 1) if parts[0].dim() == 1 else torch.cat(parts, 1).reshape(ROWS, COLUMNS)


def written(run: Run) -> Tensor:
    """A value that is written before it is saved, between two saves, or through a view."""
    x = run.fresh()
    if run.random.random() < 0.5:
        run.unused.append(x * run.scale())
    y = run.write(x) * run.scale()
    if run.random.random() < 0.7:
        return y
    run.unused.append(y)
    return x.mul(2)


def written_too_late(run: Run) -> Tensor:
    """PyTorch refuses the backward pass, unless nothing needs this value."""
    x = run.fresh()
    y = x.square()
    x.mul_(2)
    return y


def unsafe_parts(run: Run) -> Tensor:
    """Parts of one storage with separate version counters, written and saved in turn."""
    x = run.fresh()
    count, dim = run.random.choice([2, 4]), run.random.randrange(2)
    if run.random.random() < 0.5:
        parts = list(torch.unsafe_chunk(x, count, dim))
    else:
        parts = list(torch.unsafe_split(x, x.shape[dim] // count, dim))
    del x
    made = []
    for part in parts:
        part = run.write(part) if run.random.random() < 0.8 else part
        made.append(part.sigmoid() * part)
    if run.random.random() < 0.5:
        made = [one * parts[0] for one in made]
    return torch.cat(made, dim)


def written_unseen(run: Run) -> Tensor:
    """A value that is saved, written without PyTorch's knowledge, and saved again. The first save
    is never needed."""
    x = run.fresh().detach()
    run.unused.append(x * run.scale())
    if run.random.random() < 0.5:
        run.unused.append(x[: ROWS // 2] @ run.parts.square)
    run.write_unseen(x)
    return x * run.scale() + x @ run.parts.square


def filled_in_parts(run: Run) -> Tensor:
    """Saves each part as soon as it is filled, as a kernel unknown to PyTorch may do."""
    x = torch.zeros(ROWS, COLUMNS, device=run.value().device)
    count = run.random.choice([2, 3])
    parts = x.chunk(count, run.random.randrange(2))
    made = []
    for part in parts:
        rows, columns = part.shape
        part.data.copy_(run.value().detach()[:rows, :columns])
        run.write_unseen(part)
        made.append((part * run.scale()[:rows, :columns]).sum())
    return run.value() * torch.stack(made).sum().tanh()


def functions(run: Run) -> Tensor:
    x = run.fresh()
    return Squared.apply(x) if run.random.random() < 0.5 else Doubled.apply(x) * run.scale()


def recurrent(run: Run) -> Tensor:
    module = run.parts.recurrent
    x = run.value()
    if isinstance(module, nn.LSTMCell):
        h, c = module(x)
        h, c = module(x, (h, c))
        return h * c
    if isinstance(module, nn.GRUCell):
        return module(x, module(x))
    return module(x.view(4, ROWS // 4, COLUMNS))[0].reshape(ROWS, COLUMNS)


OPS: List[Tuple[Callable[[Run], Tensor], int]] = [
    (pointwise, 3),
    (product, 3),
    (several_readers, 2),
    (attention, 1),
    (views, 2),
    (written, 3),
    (unsafe_parts, 3),
    (written_unseen, 2),
    (filled_in_parts, 2),
    (functions, 2),
    (recurrent, 2),
]


def step(parts: Parts, random: Random, x: Tensor, block: ContextManager) -> Any:
    """Runs one step of a program. Returns its results, or ``"refused"`` if PyTorch refused it."""
    ops, weights = zip(*OPS)
    with block:
        run = Run(parts, random, [x, torch.sin(x @ parts.square)])
        for _ in range(random.randrange(4, 12)):
            run.values.append(random.choices(ops, weights)[0](run))
        if random.random() < 0.1:
            run.values.append(written_too_late(run))
        loss = sum(value.mean() for value in [run.values[1], *run.values[-4:]])
    try:
        if random.random() < 0.2:
            loss.backward(retain_graph=True)
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        gradients(parts)
        return "refused"
    return loss.detach(), gradients(parts)


def run_program(seed: int, parts: Parts, block: ContextManager) -> List[Any]:
    """The results of all steps of a program."""
    seen = []
    generator = torch.Generator().manual_seed(seed)
    device = parts.square.device
    for _ in range(STEPS):
        x = torch.randn(ROWS, COLUMNS, generator=generator).to(device)
        seen.append(step(parts, Random(seed), x, block))
    return seen


def check_program(seed: int, device: str) -> Dict[str, int]:
    """Compares a program with STORM, without it, and with ``save_on_cpu``. Returns the outcome."""
    torch.manual_seed(seed)
    parts = Parts(seed % 7).to(device)
    settings = SETTINGS[seed // 7 % len(SETTINGS)]
    block = make_block(device, seed, **settings)
    try:
        expected = run_program(seed, copy.deepcopy(parts), contextlib.nullcontext())
        if "refused" not in expected:
            witness = run_program(seed, copy.deepcopy(parts), torch.autograd.graph.save_on_cpu())
            torch.testing.assert_close(witness, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
        assert_same(expected, run_program(seed, copy.deepcopy(parts), block))
        # After an error PyTorch's engine holds the rest of the graph until it runs again.
        torch.ones((), device=device, requires_grad=True).backward()
        block.close()
        report = block.report()
        assert report.host_bytes == 0, "host memory is still held"
    except Exception as error:
        raise AssertionError(f"program {seed} on {device}, {settings}: {error}") from error
    return {
        "refused": int("refused" in expected),
        "planned": report.planned_steps,
        "moved": report.moved_tensors,
        "shared": report.shared_tensors,
    }
