"""Hooks for saved tensors: which tensors stay, and which go through the engine.

The hooks only describe tensors; the engine decides what moves, and copies it. A saved tensor
becomes a tuple that PyTorch keeps: either the tensor itself and its version, or the piece of its
storage with everything needed to recreate the same view at the same version.
"""

import sys
import weakref
from types import CodeType
from typing import Any, Dict, List, Optional, Tuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from . import _native
from ._devices import DeviceState, default_vram, warn_over_budget
from ._report import Report, make_report
from ._sizes import Size, parse_budget, parse_size, show_size

Module = TypeVar("Module", bound=nn.Module)

#: The class of tensors whose storages and views are plain memory. Tensors of other classes, such as
#: parameters, stay.
_PLAIN = torch.Tensor

#: The data of a detached tensor that keeps a version counter alive without its memory.
_NOTHING = torch.empty(0)

#: A multiple of the alignment of PyTorch's allocators, for the CPU and for GPUs. Kernels may depend
#: on how a pointer is aligned.
_ALIGNMENT = 512

POLICIES = ("auto", "all")

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_functional = torch._is_functional_tensor
_in_backward = torch._C._current_graph_task_id

#: For functions that ``torch.compile`` must not trace: a call is a graph break. Like
#: ``torch.compiler.disable``, but does not import the compiler before the first call.
_not_compiled = torch._disable_dynamo


class Offload:
    """A reusable ``with`` block for training steps that offloads the tensors saved inside it.

    Args:
        vram: The most memory that PyTorch may allocate on a GPU, as ``torch.cuda.max_memory_allocated``
            counts it, for example ``"24GiB"``. On the CPU, the most that saved tensors may use. As many
            tensors stay as fit. Default: nine tenths of the card.
        policy: ``"auto"`` keeps what fits in ``vram``. ``"all"`` offloads everything that helps,
            except for the last tensors saved, up to ``window`` bytes. It cannot be combined with
            ``vram``.
        ram: The most host memory to use for each GPU. What does not fit there stays on the GPU.
            Default: what the machine has.
        window: How far the peak under ``"all"`` may exceed the least possible, in bytes. Also how
            much is in flight at a time while there is no plan.
        keep_below: Tensors smaller than this stay.
        device: ``"cuda"`` or ``"cpu"``. Tensors on other devices stay. Default: ``"cuda"`` if
            there is a GPU, otherwise ``"cpu"``.
        chaos_seed: Delays copies at random, for tests. Results do not change.
    """

    def __init__(
        self,
        vram: Optional[Size] = None,
        policy: str = "auto",
        *,
        ram: Optional[Size] = None,
        window: Size = "640MiB",
        keep_below: Size = "256KiB",
        device: Optional[str] = None,
        chaos_seed: Optional[int] = None,
    ):
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: choose one of {', '.join(map(repr, POLICIES))}")
        if policy == "all" and vram is not None:
            raise ValueError('policy="all" offloads whatever vram would allow: give one of the two')
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device not in ("cuda", "cpu"):
            raise ValueError(f'device={device!r}: choose "cuda" or "cpu"')
        self._settings: Dict[str, Any] = dict(
            vram=vram,
            policy=policy,
            ram=ram,
            window=window,
            keep_below=keep_below,
            device=device,
            chaos_seed=chaos_seed,
        )
        self._vram_bytes = None if vram is None else parse_budget(vram, "vram")
        self._ram_bytes = None if ram is None else parse_budget(ram, "ram")
        self._window_bytes = parse_size(window, "window")
        self._keep_below_bytes = parse_size(keep_below, "keep_below")
        self._device_type = device
        self._states: Dict[torch.device, DeviceState] = {}
        self._entered: List[saved_tensors_hooks] = []
        self._warned = False

    @_not_compiled
    def __enter__(self) -> "Offload":
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    @_not_compiled
    def __exit__(self, *exception: object) -> None:
        self._entered.pop().__exit__(*exception)
        self._check_budget()

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Offload":
        return Offload(**self._settings)

    def __reduce__(self) -> Tuple[Any, ...]:
        return _make, (self._settings,)

    @_not_compiled
    def report(self, device: Optional[torch.device] = None) -> Report:
        """The figures so far, on ``device``, or on the first device that was used."""
        if device is None:
            if not self._states:
                raise RuntimeError("nothing was saved yet: run a forward pass inside the block first")
            state = next(iter(self._states.values()))
        else:
            state = self._states[torch.device(device)]
        return make_report(str(state.device), state.engine.report(), state.peak_bytes())

    @_not_compiled
    def close(self) -> None:
        """Returns unused host memory to the system. After a backward pass, that is all of it."""
        for state in self._states.values():
            state.engine.give_back_host_memory()

    def _state(self, device: torch.device) -> DeviceState:
        vram_bytes = self._vram_bytes
        if self._settings["policy"] == "auto" and vram_bytes is None:
            vram_bytes = default_vram(device)
        chaos_seed = self._settings["chaos_seed"]
        state = DeviceState(device, vram_bytes, self._ram_bytes, self._window_bytes, chaos_seed)
        self._states[device] = state
        return state

    @_not_compiled
    def _pack(self, tensor: Tensor) -> Tuple[Any, ...]:
        version = tensor._version
        if tensor.is_leaf and tensor.requires_grad:
            # The user holds it, and may replace its data before the backward pass: PyTorch would read the new data.
            return tensor, version
        if tensor.__class__ is not _PLAIN or self._stays(tensor):
            return tensor.detach(), version
        storage = tensor.untyped_storage()
        storage_bytes = storage.nbytes()
        offset, itemsize = tensor.storage_offset(), tensor.element_size()
        size, stride = tensor.size(), tensor.stride()
        if tensor.is_contiguous():
            extent = tensor.numel()
        else:
            extent = 1 + sum((count - 1) * step for count, step in zip(size, stride))
        start, end = offset * itemsize, (offset + extent) * itemsize
        if end - start < self._keep_below_bytes or extent == 0:
            return tensor.detach(), version
        # Views of one storage often overlap without one containing the other, for example packed queries and
        # keys. Only a small part of a large storage, for example of a dataset, moves alone.
        if 2 * (end - start) >= storage_bytes:
            start, end = 0, storage_bytes
        else:
            start -= start % _ALIGNMENT
        device = tensor.device
        state = self._states.get(device) or self._state(device)
        piece = state.engine.save(storage, start, end, version, state.current_stream())
        counter = tensor.detach()
        counter.data = _NOTHING
        return counter, version, piece, state, tensor.dtype, size, stride, offset, itemsize

    def _stays(self, tensor: Tensor) -> bool:
        """Whether the tensor stays, because moving it would free no memory or is impossible."""
        if tensor.device.type != self._device_type or tensor.layout is not torch.strided:
            return True
        # The user holds leaves, so they and their views stay.
        base = tensor._base
        if base is not None and base.is_leaf and base.requires_grad:
            return True
        # Tensors saved in a backward pass, for example by checkpoints, are needed right away.
        if _in_backward() != -1:
            return True
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return True
        # Tensors without a storage: zeros of forward-mode differentiation, and those that transforms wrap.
        return tensor._is_zerotensor() or _is_wrapped(tensor) or _is_functional(tensor)

    @staticmethod
    @_not_compiled
    def _unpack(packed: Tuple[Any, ...]) -> Tensor:
        tensor, version = packed[0], packed[1]
        if tensor._version != version:
            raise _changed(tensor, version, packed)
        if len(packed) == 2:
            return tensor
        _, _, piece, state, dtype, size, stride, offset, itemsize = packed
        stream = state.current_stream()
        storage, start = piece.fetch(stream)
        view = torch.empty(0, dtype=dtype, device=state.device)
        view.set_(storage, offset - start // itemsize, size, stride)
        # The result has the version counter of the saved tensor. Other saves may return the same
        # memory. If a backward pass writes to it, they are refused, as without STORM.
        unpacked = tensor.detach()
        unpacked.data = state.hand_over(view, stream)
        return unpacked

    def _check_budget(self) -> None:
        if self._warned or self._vram_bytes is None:
            return
        for state in self._states.values():
            report = state.engine.report()
            if report.least_peak_bytes > report.allowed_bytes > 0:
                self._warned = True
                least, allowed = report.least_peak_bytes, report.allowed_bytes
                warn_over_budget(state.device, show_size(least), show_size(allowed))


def _changed(tensor: Tensor, version: int, packed: Tuple[Any, ...]) -> RuntimeError:
    shape = list(tensor.shape if len(packed) == 2 else packed[5])
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {shape}] is at version {tensor._version}; expected version {version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def _place_of_call() -> Tuple[CodeType, int]:
    """The place of the call in the user's program, skipping PyTorch's own functions."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith("torch.") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def _make(settings: Dict[str, Any]) -> Offload:
    return Offload(**settings)


# The same call returns the same block in every iteration of a loop, so recordings are not lost.
_known: "weakref.WeakValueDictionary[Tuple[Any, ...], Offload]" = weakref.WeakValueDictionary()
_latest: Optional[Offload] = None


@_not_compiled
def offload(
    vram: Optional[Size] = None,
    policy: str = "auto",
    *,
    ram: Optional[Size] = None,
    window: Size = "640MiB",
    keep_below: Size = "256KiB",
    device: Optional[str] = None,
    chaos_seed: Optional[int] = None,
) -> Offload:
    """Returns a ``with`` block that offloads the tensors that autograd saves inside it.

    See :class:`Offload` for the arguments. The same call at the same place in a program returns the
    same block, so it may be inside a training loop.
    """
    global _latest
    key = (_place_of_call(), vram, policy, ram, window, keep_below, device, chaos_seed)
    block = _known.get(key)
    if block is None:
        block = Offload(
            vram,
            policy,
            ram=ram,
            window=window,
            keep_below=keep_below,
            device=device,
            chaos_seed=chaos_seed,
        )
        _known[key] = block
    _latest = block
    return block


def wrap(
    module: Module,
    vram: Optional[Size] = None,
    policy: str = "auto",
    *,
    ram: Optional[Size] = None,
    window: Size = "640MiB",
    keep_below: Size = "256KiB",
    device: Optional[str] = None,
    chaos_seed: Optional[int] = None,
) -> Module:
    """Offloads what autograd saves in every forward pass of ``module``. Returns ``module`` itself.

    See :class:`Offload` for the arguments, and :func:`session` for the report.
    """
    if session(module) is not None:
        raise ValueError("this module is wrapped already")
    block = Offload(
        vram,
        policy,
        ram=ram,
        window=window,
        keep_below=keep_below,
        device=device,
        chaos_seed=chaos_seed,
    )
    module._storm_offload = block
    module.register_forward_pre_hook(_enter)
    module.register_forward_hook(_exit, always_call=True)
    return module


def session(module: nn.Module) -> Optional[Offload]:
    """The block of a wrapped module. None if the module is not wrapped."""
    return module.__dict__.get("_storm_offload")


def _enter(module: nn.Module, inputs: Any) -> None:
    module._storm_offload.__enter__()


def _exit(module: nn.Module, inputs: Any, output: Any) -> None:
    module._storm_offload.__exit__(None, None, None)
