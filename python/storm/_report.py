"""The report of an offload, as figures and as text."""

from dataclasses import dataclass
from typing import Dict, Optional

from . import _native
from ._sizes import show_size


@dataclass(frozen=True)
class Report:
    """Sums over all steps so far; ``kept``, ``moved`` and ``shared`` are for the last step only."""

    device: str
    #: Numbers of steps: all, recorded ones, and ones that followed a plan.
    steps: int
    recorded_steps: int
    planned_steps: int
    #: Bytes copied to host memory and back.
    stored_bytes: int
    fetched_bytes: int
    #: Seconds of all copies, seconds that the compute stream waited for them, and how often it
    #: waited.
    copy_seconds: float
    stall_seconds: float
    stalls: int
    #: Tensors that stayed, that were offloaded, and that were saved again while already saved.
    kept_tensors: int
    kept_bytes: int
    moved_tensors: int
    moved_bytes: int
    shared_tensors: int
    shared_bytes: int
    #: Host memory held now, and the most that was in use at a time.
    host_bytes: int
    host_used_bytes: int
    #: PyTorch's own peak (``torch.cuda.max_memory_allocated``), kept across STORM's resets of it;
    #: None on the CPU.
    peak_bytes: Optional[int]
    #: The current plan's peak, the least peak with everything offloaded, and the budget. 0 without
    #: a plan.
    planned_peak_bytes: int
    least_peak_bytes: int
    allowed_bytes: int

    @property
    def hidden_share(self) -> float:
        """The share of copying time that the compute stream did not wait for; 1 if nothing was
        copied."""
        if self.copy_seconds <= 0:
            return 1.0
        return max(0.0, 1.0 - self.stall_seconds / self.copy_seconds)

    def as_dict(self) -> Dict[str, object]:
        """All figures by name."""
        return {**self.__dict__, "hidden_share": self.hidden_share}

    def __str__(self) -> str:
        lines = [
            f"storm on {self.device}: {self.steps} steps, {self.recorded_steps} recorded, "
            f"{self.planned_steps} by plan",
            f"  moved    {show_size(self.stored_bytes)} out, {show_size(self.fetched_bytes)} back; "
            f"{self.hidden_share:.0%} hidden, {self.stalls} stalls, {self.stall_seconds:.3f} s",
            f"  last step  kept {self.kept_tensors} ({show_size(self.kept_bytes)}), "
            f"offloaded {self.moved_tensors} ({show_size(self.moved_bytes)}), "
            f"deduplicated {self.shared_tensors} ({show_size(self.shared_bytes)})",
            f"  host     {show_size(self.host_bytes)} held, {show_size(self.host_used_bytes)} used",
        ]
        if self.peak_bytes is not None:
            lines.append(f"  peak     {show_size(self.peak_bytes)} allocated by PyTorch")
        if self.allowed_bytes:
            lines.append(
                f"  plan     peak {show_size(self.planned_peak_bytes)} of "
                f"{show_size(self.allowed_bytes)} allowed; at least {show_size(self.least_peak_bytes)}"
            )
        return "\n".join(lines)


def make_report(device: str, engine: _native.Report, peak_bytes: Optional[int]) -> Report:
    """Builds a report from the engine's figures and PyTorch's."""
    (kept, moved, shared) = (engine.kept, engine.moved, engine.shared)
    return Report(
        device=device,
        steps=engine.steps,
        recorded_steps=engine.recorded_steps,
        planned_steps=engine.planned_steps,
        stored_bytes=engine.stored_bytes,
        fetched_bytes=engine.fetched_bytes,
        copy_seconds=engine.copy_seconds,
        stall_seconds=engine.stall_seconds,
        stalls=engine.stalls,
        kept_tensors=kept[0],
        kept_bytes=kept[1],
        moved_tensors=moved[0],
        moved_bytes=moved[1],
        shared_tensors=shared[0],
        shared_bytes=shared[1],
        host_bytes=engine.host_bytes,
        host_used_bytes=engine.host_used_bytes,
        peak_bytes=peak_bytes,
        planned_peak_bytes=engine.planned_peak_bytes,
        least_peak_bytes=engine.least_peak_bytes,
        allowed_bytes=engine.allowed_bytes,
    )
