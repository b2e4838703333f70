"""Compares a loop with STORM and the same loop without it, bit for bit."""

import contextlib
import copy
from typing import Any, Callable, ContextManager, Dict, List

import torch
from torch import Tensor, nn

from .._offload import Offload

#: A loop: runs steps of a model, with the block around its forward passes, and returns its results.
Loop = Callable[[nn.Module, ContextManager], Any]

#: Settings that keep everything, keep some, and offload everything.
SETTINGS: List[Dict[str, Any]] = [
    {"policy": "all", "window": 0},
    {"policy": "all", "window": "100KiB"},
    {"vram": "150KiB"},
    {"vram": "1TiB"},
    {"policy": "all", "window": 0, "ram": "64KiB"},
]


def make_block(device: str, seed: int, **settings: Any) -> Offload:
    """A block for tiny tensors, with random delays of copies."""
    return Offload(**{"keep_below": 0, "device": device, "chaos_seed": seed, **settings})


def gradients(module: nn.Module) -> List[Any]:
    """Copies all gradients, then clears them."""
    found = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad(set_to_none=True)
    return found


def assert_same(expected: Any, found: Any) -> None:
    """Asserts that nested lists have the same tensors, bit for bit."""
    if isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for one, other in zip(expected, found):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(expected, found), f"off by {(expected - found).abs().max()}"
    else:
        assert expected == found


def run_twice(loop: Loop, module: nn.Module, block: ContextManager, seed: int = 3) -> None:
    """Runs a loop without STORM and with it, from the same state, and compares all results."""
    plain, offloaded = copy.deepcopy(module), copy.deepcopy(module)
    torch.manual_seed(seed)
    expected = loop(plain, contextlib.nullcontext())
    torch.manual_seed(seed)
    found = loop(offloaded, block)
    assert_same(expected, found)
    assert_same(list(plain.parameters()), list(offloaded.parameters()))
