"""PyTorch's devices, for the engine and the hooks."""

import warnings
from typing import Optional, Tuple

import torch

from . import _native


class DeviceState:
    """The engine of one device, and the queries to PyTorch that the engine and the hooks make."""

    def __init__(
        self,
        device: torch.device,
        vram_bytes: Optional[int],
        ram_bytes: Optional[int],
        window_bytes: int,
        chaos_seed: Optional[int],
    ):
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._peak_bytes = 0
        # The first stream in which a tensor was needed. Memory is allocated in it; the allocator
        # must be told of uses in other streams.
        self.stream: Optional[int] = None
        self.engine = _native.Engine(
            device.index if self.is_cuda else None,
            vram_bytes,
            ram_bytes,
            window_bytes,
            self._allocate,
            self._memory_use,
            chaos_seed,
        )

    def current_stream(self) -> int:
        """The handle of PyTorch's current stream."""
        if not self.is_cuda:
            return 0
        return _current_raw_stream(self.device.index)

    def hand_over(self, tensor: torch.Tensor, stream: int) -> torch.Tensor:
        """Tells the allocator if ``tensor`` is used in a stream other than the one it was allocated in."""
        if self.stream is None:
            self.stream = stream
        elif stream != self.stream:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor

    def peak_bytes(self) -> Optional[int]:
        """The peak of the memory that PyTorch allocated, including before resets of its record."""
        if not self.is_cuda:
            return None
        return max(self._peak_bytes, torch.cuda.max_memory_allocated(self.device))

    def _allocate(self, size: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(size, device=self.device)

    def _memory_use(self, forget_peak: bool) -> Optional[Tuple[int, int, int]]:
        if not self.is_cuda:
            return None
        allocated = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        if forget_peak:
            # The peak of a part of a step is visible only if PyTorch's record is reset first.
            self._peak_bytes = max(self._peak_bytes, allocated["peak"])
            torch.cuda.reset_peak_memory_stats(self.device)
        return allocated["current"], allocated["allocated"], allocated["peak"]


def _current_raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# Much cheaper than creating a stream object. This runs for every saved tensor.
_current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_raw_stream)


def default_vram(device: torch.device) -> Optional[int]:
    """The default budget: the card's memory, minus a tenth for what PyTorch does not count."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory * 9 // 10


def warn_over_budget(device: torch.device, least: str, allowed: str) -> None:
    warnings.warn(
        f"storm: a step on {device} needs at least {least} with everything offloaded that fits in host memory, "
        f"but vram allows {allowed}: use a smaller batch or gradient checkpointing",
        stacklevel=6,
    )
