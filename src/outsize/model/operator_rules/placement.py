"""How one value lies on the ranks of a mesh axis: replicated, sharded along a dim, or as a partial sum.

    value            rank 0        rank 1        its gradient
    Replicate        x             x             the whole gradient on every rank
    Replicate(~)     x             x             a share on each rank; their sum is the gradient
    Shard(d)         x[:n/2]       x[n/2:]       the same shard of the gradient
    Partial          a             x - a         the whole gradient on every rank

``Shard`` with segments cuts each contiguous piece of the dim on its own, as a fused query-key-value
projection needs:  q0 q1 | k0 k1 | v0 v1  ->  rank 0: q0 k0 v0, rank 1: q1 k1 v1.

A size that the degree does not divide is cut in ``atoms``, of which the first ranks get one more. Six heads
of width 4 over four ranks lie as S1[6] where they are a dim of their own, and as S2[24]/6 where they are not:

    heads     0 1 | 2 3 | 4 | 5         S1[6]
    width     0-7 | 8-15 | 16-19 | 20-23    S2[24]/6
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

__all__ = ["Partial", "Placement", "Replicate", "Shard", "parse_placement", "share_start"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the value; with ``partial_gradient``, only a share of its gradient."""

    partial_gradient: bool = False

    def __str__(self) -> str:
        return "R~" if self.partial_gradient else "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds a part of dim ``dim``; ``segments`` are sizes of pieces that are cut one by one.

    Without segments the whole dim is cut evenly. With segments (one is the size of the dim) every piece is
    cut in ``atoms`` equal parts, or in its elements where that is 0, and the parts need not divide evenly.
    """

    dim: int
    segments: tuple[int, ...] = ()
    atoms: int = 0

    def __str__(self) -> str:
        segments = f"[{','.join(map(str, self.segments))}]" if self.segments else ""
        return f"S{self.dim}{segments}" + (f"/{self.atoms}" if self.atoms else "")

    def pieces(self, size: int) -> tuple[int, ...]:
        """Return the sizes of the pieces of a dim of ``size`` elements."""
        return self.segments or (size,)

    def divides(self, shape: tuple[int, ...], degree: int) -> bool:
        """Tell whether every piece divides evenly over ``degree`` ranks."""
        if not self._is_dim_of(shape):
            return False
        counts = [self.atoms or piece for piece in self.pieces(shape[self.dim])]
        return all(count >= degree and count % degree == 0 for count in counts)

    def fits(self, shape: tuple[int, ...], degree: int) -> bool:
        """Tell whether a dim of this size can be cut so, every rank getting something."""
        if not self.segments:
            return self.divides(shape, degree)
        pieces = self.segments
        return self._is_dim_of(shape) and all(
            (self.atoms or piece) >= degree and piece % (self.atoms or piece) == 0 for piece in pieces
        )

    def ranges(self, size: int, degree: int, rank: int) -> list[tuple[int, int]]:
        """Return ``(start, length)`` in the whole dim of what ``rank`` holds, one for each piece."""
        pieces = self.pieces(size)
        starts = itertools.accumulate(pieces[:-1], initial=0)
        found = []
        for start, piece in zip(starts, pieces, strict=True):
            count = self.atoms or piece
            first, last = (share_start(count, degree, r) for r in (rank, rank + 1))
            found.append((start + first * (piece // count), (last - first) * (piece // count)))
        return found

    def length(self, size: int, degree: int, rank: int) -> int:
        """Return how many of ``size`` elements ``rank`` holds."""
        return sum(length for _, length in self.ranges(size, degree, rank))

    def _is_dim_of(self, shape: tuple[int, ...]) -> bool:
        return self.dim < len(shape) and sum(self.pieces(shape[self.dim])) == shape[self.dim]


def share_start(count: int, degree: int, rank: int) -> int:
    """Return where the share of ``rank`` starts when ``count`` things are dealt out in order.

    The first ``count % degree`` ranks get one more than the others.
    """
    return rank * (count // degree) + min(rank, count % degree)


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
    match = re.fullmatch(r"S(\d+)(?:\[([\d,]+)\])?(?:/(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no placement")
    segments = tuple(int(size) for size in match[2].split(",")) if match[2] else ()
    return Shard(int(match[1]), segments, int(match[3] or 0))
