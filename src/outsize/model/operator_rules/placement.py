"""How one value lies on the ranks of a mesh axis: replicated, sharded along a dim, or as a partial sum.

    value            rank 0        rank 1        its gradient
    Replicate        x             x             the whole gradient on every rank
    Replicate(~)     x             x             a share on each rank; their sum is the gradient
    Shard(d)         x[:n/2]       x[n/2:]       the same shard of the gradient
    Partial          a             x - a         the whole gradient on every rank

``Shard`` with segments cuts each contiguous piece of the dim on its own, as a fused query-key-value
projection needs:  q0 q1 | k0 k1 | v0 v1  ->  rank 0: q0 k0 v0, rank 1: q1 k1 v1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Partial", "Placement", "Replicate", "Shard", "parse_placement"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the value; with ``partial_gradient``, only a share of its gradient."""

    partial_gradient: bool = False

    def __str__(self) -> str:
        return "R~" if self.partial_gradient else "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds a part of dim ``dim``; ``segments`` are sizes of pieces that are cut one by one."""

    dim: int
    segments: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"S{self.dim}" + (f"[{','.join(map(str, self.segments))}]" if self.segments else "")

    def pieces(self, size: int) -> tuple[int, ...]:
        """Return the sizes of the pieces of a dim of ``size`` elements."""
        return self.segments or (size,)

    def divides(self, shape: tuple[int, ...], degree: int) -> bool:
        """Tell whether every piece divides evenly over ``degree`` ranks."""
        if self.dim >= len(shape) or sum(self.pieces(shape[self.dim])) != shape[self.dim]:
            return False
        return all(piece >= degree and piece % degree == 0 for piece in self.pieces(shape[self.dim]))


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum of what the ranks hold."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial


def parse_placement(text: str) -> Placement:
    """Return the placement that ``str(placement)`` wrote.

    Raises:
        ValueError: ``text`` is no placement.
    """
    if text in ("R", "R~"):
        return Replicate(partial_gradient=text == "R~")
    if text == "P":
        return Partial()
    match = re.fullmatch(r"S(\d+)(?:\[([\d,]+)\])?", text)
    if match is None:
        raise ValueError(f"{text!r} is no placement")
    segments = tuple(int(size) for size in match[2].split(",")) if match[2] else ()
    return Shard(int(match[1]), segments)
