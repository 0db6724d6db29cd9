"""One door to every schedule by name, with its legal numbers of stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outsize.errors import PlanError
from outsize.plan.actions import Schedule
from outsize.plan.schedules.gpipe import generate_gpipe
from outsize.plan.schedules.one_forward_one_backward import generate_1f1b

__all__ = ["SCHEDULE_NAMES", "legal_microbatch_counts", "make_schedule"]


@dataclass(frozen=True, slots=True)
class _Family:
    """A generator and what it can be asked for."""

    generate: Callable[[int, int, int], Schedule]  # ranks, virtual stages, micro-batches
    virtual_stages: range  # legal numbers of stages on each rank
    default_virtual_stages: int
    why_virtual_stages: str
    is_legal_microbatch_count: Callable[[int, int], bool] = lambda _ranks, _microbatches: True
    why_microbatch_count: str = ""


_ONE = range(1, 2)

_FAMILIES: dict[str, _Family] = {
    "gpipe": _Family(lambda p, _v, m: generate_gpipe(p, m), _ONE, 1, "it has one stage on each rank"),
    "1f1b": _Family(lambda p, _v, m: generate_1f1b(p, m), _ONE, 1, "it has one stage on each rank"),
}

SCHEDULE_NAMES = tuple(_FAMILIES)


def make_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, num_virtual_stages: int | None = None
) -> Schedule:
    """Return the schedule ``name`` for ``num_ranks`` ranks with ``num_virtual_stages`` stages on each.

    Without ``num_virtual_stages`` the schedule's usual number is taken (1, or 2 where it needs several).

    Raises:
        PlanError: no such schedule, or numbers it does not allow; the nearest legal ones are named.
    """
    family = _family(name)
    _check_positive(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    virtual = family.default_virtual_stages if num_virtual_stages is None else num_virtual_stages
    if virtual not in family.virtual_stages:
        legal = min(family.virtual_stages, key=lambda number: abs(number - virtual))
        raise PlanError(
            f"Schedule {name} cannot have {virtual} stages on each rank.",
            why=f"{family.why_virtual_stages}.",
            attempt=f"{legal} on each rank, that is {legal * num_ranks} stages on {num_ranks} ranks.",
        )
    if not family.is_legal_microbatch_count(num_ranks, num_microbatches):
        raise PlanError(
            f"Schedule {name} cannot run {num_microbatches} micro-batches on {num_ranks} ranks.",
            why=f"{family.why_microbatch_count}.",
            attempt=_as_choice(legal_microbatch_counts(name, num_ranks=num_ranks, near=num_microbatches)),
        )
    return family.generate(num_ranks, virtual, num_microbatches)


def legal_microbatch_counts(name: str, *, num_ranks: int, near: int) -> tuple[int, ...]:
    """Return the legal numbers of micro-batches nearest to ``near``: itself, or one below and one above."""
    is_legal = _family(name).is_legal_microbatch_count
    below = next((count for count in range(near, 0, -1) if is_legal(num_ranks, count)), None)
    if below == near:
        return (near,)
    above = next(count for count in range(near + 1, near + 4 * num_ranks + 2) if is_legal(num_ranks, count))
    return (above,) if below is None else (below, above)


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise PlanError(
            f"There is no schedule {name!r}.",
            attempt=f"one of {', '.join(SCHEDULE_NAMES)}, or a schedule file.",
        )
    return _FAMILIES[name]


def _check_positive(name: str, **numbers: int) -> None:
    for what, number in numbers.items():
        if number < 1:
            words = what.removeprefix("num_").replace("microbatches", "micro-batches")
            raise PlanError(f"Schedule {name} cannot have {number} {words}.", attempt="1 or more.")


def _as_choice(numbers: tuple[int, ...]) -> str:
    return f"{' or '.join(str(number) for number in numbers)} micro-batches."
