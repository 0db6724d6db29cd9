"""One kind of link between devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link"]


@dataclass(frozen=True, slots=True)
class Link:
    """A link as one device sees it: bytes per second in each direction, and latency of a message.

    ``bandwidth_bytes_per_s`` is what large messages reach (bus bandwidth of a collective), not the
    number printed on the wire. Where devices of a machine share network cards, it is one device's share.
    """

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float

    def is_slower_than(self, other: Link) -> bool:
        """Whether a large message takes longer here than over ``other``."""
        return self.bandwidth_bytes_per_s < other.bandwidth_bytes_per_s
