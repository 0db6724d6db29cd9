"""One device: its memory and how fast it computes and reads that memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PRECISIONS", "Device"]

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class Device:
    """A device as its data sheet gives it.

    ``flops_per_s`` holds the dense matrix rate by precision. ``reserve_bytes`` is memory that no tensor
    can use: the driver's context, communication libraries, allocator fragmentation. An emulated device
    is a local process with a memory limit; emulated devices share the machine's cores.
    """

    kind: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    reserve_bytes: int = 0
    is_emulated: bool = False

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors can use."""
        return max(self.memory_bytes - self.reserve_bytes, 0)

    def rate(self, precision: str) -> float:
        """Return the dense matrix rate in FLOP/s, falling back to the next wider precision known."""
        fallback = {"fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "fp64": "fp32"}
        while precision not in self.flops_per_s and precision in fallback:
            precision = fallback[precision]
        return self.flops_per_s[precision]
