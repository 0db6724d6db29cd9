"""What losses are divided by: all that counts in a step, or for each replica what counts there.

squared errors 1, 4 | 36 of two replicas    samples:   (1 + 4 + 36) / 3
                                            replicas:  ((1 + 4) / 2 + 36 / 1) / 2

The first is the loss of one process, whatever the shares of the replicas. The second is what replicas get
that each take the mean over their own samples, and then the mean of their gradients. Both are the same where
all replicas have as many elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.model.loss_elements import loss_scales
from outsize.model.program import Program

__all__ = ["LossDenominators", "denominators_by_part"]


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """The elements that each loss term's mean is taken over, and over how many replicas means are taken."""

    totals: Sequence[float]
    num_means: int

    def scales(self, recording: Program, counts: Sequence[float]) -> list[float]:
        """Return the factor of each loss term for a micro-batch with so many elements."""
        return [scale / self.num_means for scale in loss_scales(recording, counts, self.totals)]


def denominators_by_part(
    counts: Sequence[Sequence[float]], num_replicas: int, denominator: str
) -> list[LossDenominators]:
    """Return the denominators of every micro-batch, given the elements of each of its loss terms.

    ``counts`` has the micro-batches of all replicas in order, as many for each.
    """
    if denominator == "samples":
        return [LossDenominators(_totals(counts), num_means=1)] * len(counts)
    of_each = len(counts) // num_replicas
    by_replica = [
        LossDenominators(_totals(counts[first : first + of_each]), num_means=num_replicas)
        for first in range(0, len(counts), of_each)
    ]
    return [each for each in by_replica for _ in range(of_each)]


def _totals(counts: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*counts, strict=True)]
