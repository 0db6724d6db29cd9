"""Measures the peak device memory of this process above a baseline."""

from __future__ import annotations

import gc

import torch

from outsize.runtime.process_memory import is_supported, read_memory_bytes, reset_resident_peak

__all__ = ["MemoryMeter", "start_measuring"]


def start_measuring(device: torch.device) -> MemoryMeter:
    """Return a meter whose baseline is what is in use now, without garbage."""
    gc.collect()
    return MemoryMeter(device)


class MemoryMeter:
    """Peak memory on ``device`` since the meter was made or last reset, without what was there at its making.

    On an accelerator: the allocator's own statistics. On a CPU, where a process stands for a device: the
    peak resident memory (``VmHWM``) less the resident memory at the baseline. Make the meter after imports,
    process groups and threads are up, so that the baseline holds them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline_bytes = self._allocated_bytes()
        self.reset_peak()

    @property
    def is_supported(self) -> bool:
        """Whether this system can measure at all: accelerators and Linux can."""
        return self._device.type != "cpu" or is_supported()

    def reset_peak(self) -> None:
        """Forget the peak; the baseline stays."""
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        elif is_supported():
            reset_resident_peak()

    def measure_peak_bytes(self) -> int | None:
        """Return the peak above the baseline, or None where this system does not tell."""
        if not self.is_supported:
            return None
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device) - self._baseline_bytes
        return max(0, read_memory_bytes("VmHWM") - self._baseline_bytes)

    def measure_allocated_bytes(self) -> int | None:
        """Return what is held now above the baseline, or None where this system does not tell."""
        return self._allocated_bytes() - self._baseline_bytes if self.is_supported else None

    def _allocated_bytes(self) -> int:
        if self._device.type != "cpu":
            return torch.accelerator.memory_allocated(self._device)
        return read_memory_bytes("VmRSS") if is_supported() else 0
