"""The order in which a rank with several stages takes them, and how forwards and backwards alternate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outsize.plan.actions import Action, ActionKind

__all__ = ["alternate", "interleaved_actions", "microbatches_per_round"]


def microbatches_per_round(num_ranks: int, num_microbatches: int) -> int | None:
    """Return how many micro-batches run on a stage before the rank's next one; None where rounds are uneven.

    As many rounds of at least p micro-batches as there can be, all of the same size.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    return None if num_microbatches % num_rounds else num_microbatches // num_rounds


def interleaved_actions(
    stages: Sequence[int], kind: ActionKind, num_microbatches: int, round_size: int
) -> list[Action]:
    """Return a rank's actions of one kind: a round of micro-batches on its first stage, then on the next.

    ```
    stages (0, 2), 4 micro-batches in rounds of 2:   0F0 0F1 2F0 2F1   0F2 0F3 2F2 2F3
    ```
    """
    return [
        Action(stage, kind, microbatch)
        for first in range(0, num_microbatches, round_size)
        for stage in stages
        for microbatch in range(first, min(first + round_size, num_microbatches))
    ]


def alternate(
    num_warmup: int, forwards: Sequence[Action], backwards: Sequence[Action]
) -> Iterator[tuple[Action, ...]]:
    """Yield the warm-up's forwards one by one, then pairs of a forward and a backward, then backwards."""
    num_warmup = min(num_warmup, len(forwards))
    for forward in forwards[:num_warmup]:
        yield (forward,)
    num_pairs = len(forwards) - num_warmup
    yield from zip(forwards[num_warmup:], backwards[:num_pairs], strict=True)
    for backward in backwards[num_pairs:]:
        yield (backward,)
