"""Random autograd programs and some of their parts; compiled functions, transforms, storages."""

import contextlib
import os

import pytest
import storm
import torch
from storm.selftest.compare import assert_same, gradients, make_block, run_twice
from storm.selftest.programs import check_program
from torch import nn

#: Programs per test.
PART = 15
PROGRAMS = 3000 if os.environ.get("STORM_LONG_TESTS") == "1" else 150


@pytest.mark.filterwarnings("ignore:storm. a step on")
@pytest.mark.parametrize("first", range(0, PROGRAMS, PART))
def test_random_programs(first):
    seen = [check_program(seed, "cpu") for seed in range(first, first + PART)]
    assert sum(program["moved"] for program in seen) > 0
    assert sum(program["shared"] for program in seen) > 0
    assert sum(program["refused"] for program in seen) < PART // 2


RECURRENT = {
    "GRU": lambda: nn.GRU(256, 256),
    "GRU of two layers and directions": lambda: nn.GRU(256, 128, num_layers=2, bidirectional=True),
    "LSTM with a projection": lambda: nn.LSTM(256, 256, proj_size=128),
    "GRUCell": lambda: nn.GRUCell(256, 256),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("settings", [{"policy": "all", "window": 0}, {"vram": "1MiB"}])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_modules(name, settings):
    """Their gates are parts of one storage, written in turn, each with a separate version counter."""
    torch.manual_seed(0)
    x = torch.randn(128, 256) if name.endswith("Cell") else torch.randn(2, 128, 256)

    def loop(module, block):
        seen = []
        for _ in range(3):
            with block:
                out = module(x)
                loss = (out if isinstance(out, torch.Tensor) else out[0]).square().mean()
            loss.backward()
            seen.append(gradients(module))
        return seen

    block = make_block("cpu", seed=1, keep_below="64KiB", **settings)
    run_twice(loop, RECURRENT[name](), block)
    assert block.report().stored_bytes > 0
    assert block.report().planned_steps == 1


class Product(torch.autograd.Function):
    """A function whose backward pass writes to its saved input."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, x.mul_(gradient)


@pytest.mark.parametrize("settings", [{"policy": "all", "window": 0}, {"vram": "1GiB"}])
def test_memory_that_a_backward_pass_writes_is_refused_to_others(settings):
    def run(block):
        w, v = (torch.full((16, 16), value, requires_grad=True) for value in (2.0, 3.0))
        with block:
            x = torch.full((16, 16), 5.0).exp()
            loss = (x * v).sum() + Product.apply(x, w).sum()
            del x
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return w.grad, v.grad

    expected = run(contextlib.nullcontext())
    assert expected is True
    block = make_block("cpu", seed=0, **settings)
    for _ in range(3):
        assert_same(expected, run(block))


def test_parameters_with_other_data():
    """Sharded training replaces the data of parameters. PyTorch reads the data that a leaf has when
    it is needed."""

    def run(block):
        w = torch.full((8, 8), 2.0, requires_grad=True)
        x = torch.ones(8, 8, requires_grad=True)
        with block:
            loss = (x @ w).sum()
        w.data = torch.full((8, 8), 3.0)
        loss.backward()
        return x.grad

    assert_same(run(contextlib.nullcontext()), run(make_block("cpu", seed=0, policy="all", window=0)))


def forward_mode(function, block, with_tangents):
    """Gradients of the sum of a value and its tangent."""
    torch.manual_seed(0)
    w = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(8, 8, requires_grad=with_tangents)
    t = torch.randn(8, 8, requires_grad=with_tangents)
    with torch.autograd.forward_ad.dual_level():
        with block:
            y = function(torch.autograd.forward_ad.make_dual(x, t), w).sum()
        value, tangent = torch.autograd.forward_ad.unpack_dual(y)
        (value + tangent).backward()
    return w.grad, x.grad, t.grad


@pytest.mark.parametrize("with_tangents", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.tanh(x @ w) * x,
        lambda x, w: (x[:4] @ w)[1:].sigmoid(),
        lambda x, w: (x @ w).mul_(2) * w,
        lambda x, w: torch.cat([part.sin() * part for part in (x @ w).chunk(2)]),
        lambda x, w: nn.functional.layer_norm(x @ w, (8,)),
    ],
)
def test_forward_mode(function, with_tangents):
    expected = forward_mode(function, contextlib.nullcontext(), with_tangents)
    block = make_block("cpu", seed=0, policy="all", window=0)
    for _ in range(3):
        assert_same(expected, forward_mode(function, block, with_tangents))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.jacfwd])
def test_transforms(transform):
    def run(block):
        torch.manual_seed(0)
        w = torch.randn(8, 8, requires_grad=True)
        with block:
            y = transform(lambda x: (torch.tanh(x @ w) * (x @ w)).sum())(torch.ones(8, 8)).sum()
        y.backward()
        return w.grad

    block = make_block("cpu", seed=0, policy="all", window=0)
    expected = run(contextlib.nullcontext())
    for _ in range(3):
        assert_same(expected, run(block))


class Compiled(nn.Module):
    """Enters a block inside a compiled function. PyTorch runs GRUs outside of graphs, with
    hooks."""

    def __init__(self, offloaded: bool):
        super().__init__()
        torch.manual_seed(0)
        self.offloaded = offloaded
        self.linear, self.gru = nn.Linear(16, 16), nn.GRU(16, 16)

    def forward(self, x):
        x = self.linear(x).tanh()
        if not self.offloaded:
            return self.part(x)
        with storm.offload(policy="all", window=0, keep_below=0, device="cpu") as block:
            y = self.part(x)
        self.block = block
        return y

    def part(self, x):
        y = self.linear(x).sigmoid() * x
        return self.gru(y)[0].square().mean()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_a_compiled_function(backend, recwarn):
    torch._dynamo.reset()
    plain, offloaded = Compiled(False), Compiled(True)
    compiled = torch.compile(offloaded, backend=backend)
    for _ in range(3):
        x = torch.randn(5, 4, 16)
        plain(x).backward()
        compiled(x).backward()
        assert_same(gradients(plain), gradients(offloaded))
    assert offloaded.block.report().steps == 3
    assert not [warning for warning in recwarn if "storm" in str(warning.message).lower()]
    assert not [warning for warning in recwarn if "_getframe" in str(warning.message)]


def engine(device=None):
    def allocate(size):
        return torch.UntypedStorage(size)

    return storm._native.Engine(device, None, None, 0, allocate, lambda forget: None, None)


class Liar(torch.UntypedStorage):
    """Reports a larger size than it has."""

    def nbytes(self):
        return 1 << 40


@pytest.mark.parametrize("start, end", [(0, 0), (8, 4), (0, 101), (100, 101), (0, 2**63)])
def test_only_bytes_of_the_storage_are_saved(start, end):
    with pytest.raises(ValueError, match="outside of its storage, which has 100 bytes"):
        engine().save(torch.UntypedStorage(100), start, end, 0, 0)


def test_only_storages_are_saved():
    storage = torch.UntypedStorage(100)
    storage.nbytes = lambda: 1 << 40
    with pytest.raises(ValueError, match="which has 100 bytes"):
        engine().save(storage, 0, 1 << 30, 0, 0)
    for other in (Liar(100), torch.ones(3), 7, None):
        with pytest.raises(TypeError, match="expected a torch.UntypedStorage"):
            engine().save(other, 0, 4, 0, 0)
    with pytest.raises(ValueError, match="on meta, and this engine is for cpu"):
        engine().save(torch.UntypedStorage(100, device="meta"), 0, 4, 0, 0)
