"""The Rust part: queues, events, host memory and decisions."""

from typing import Callable, Optional, Tuple

import torch

__version__: str

class Engine:
    """Saved tensors of one device."""

    def __new__(
        cls,
        cuda_device: Optional[int],
        vram_bytes: Optional[int],
        ram_bytes: Optional[int],
        window_bytes: int,
        allocate: Callable[[int], torch.UntypedStorage],
        memory_use: Callable[[bool], Optional[Tuple[int, int, int]]],
        chaos_seed: Optional[int],
    ) -> Engine: ...
    def save(
        self,
        storage: torch.UntypedStorage,
        start: int,
        end: int,
        version: int,
        stream: int,
    ) -> Saved: ...
    def report(self) -> Report: ...
    def give_back_host_memory(self) -> None: ...

class Saved:
    """A piece of a storage. As long as it lives, its bytes can be fetched."""

    def fetch(self, stream: int) -> Tuple[torch.UntypedStorage, int]: ...

class Report:
    """What an engine did: sums over all steps; kept, moved and shared of the last one as (count, bytes)."""

    steps: int
    recorded_steps: int
    planned_steps: int
    stored_bytes: int
    fetched_bytes: int
    copies: int
    copy_seconds: float
    stall_seconds: float
    stalls: int
    kept: Tuple[int, int]
    moved: Tuple[int, int]
    shared: Tuple[int, int]
    host_bytes: int
    host_used_bytes: int
    planned_peak_bytes: int
    least_peak_bytes: int
    allowed_bytes: int
