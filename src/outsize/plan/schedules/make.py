"""One door to every schedule by name, with its legal numbers of stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outsize.errors import PlanError
from outsize.plan.actions import Schedule
from outsize.plan.schedules.dualpipe_v import generate_dualpipe_v
from outsize.plan.schedules.gpipe import generate_gpipe
from outsize.plan.schedules.interleaved_1f1b import generate_interleaved_1f1b
from outsize.plan.schedules.interleaved_zero_bubble import generate_interleaved_zero_bubble
from outsize.plan.schedules.interleaving import microbatches_per_round
from outsize.plan.schedules.looped_bfs import generate_looped_bfs
from outsize.plan.schedules.one_forward_one_backward import generate_1f1b
from outsize.plan.schedules.v_half import generate_v_half
from outsize.plan.schedules.v_min import generate_v_min
from outsize.plan.schedules.zb_h1 import generate_zb_h1
from outsize.plan.schedules.zb_h2 import generate_zb_h2
from outsize.plan.schedules.zb_v import generate_zb_v

__all__ = ["SCHEDULE_NAMES", "legal_microbatch_counts", "make_schedule"]


@dataclass(frozen=True, slots=True)
class _Family:
    """A generator and what it can be asked for."""

    generate: Callable[[int, int, int], Schedule]  # ranks, virtual stages, micro-batches
    num_virtual_stages: int  # the usual number; the only one unless ``any_more``
    any_more: bool
    why_virtual_stages: str
    is_legal_microbatch_count: Callable[[int, int], bool] = lambda _ranks, _microbatches: True
    why_microbatch_count: str = ""


def _single(generate: Callable[[int, int], Schedule]) -> _Family:
    return _Family(lambda p, _v, m: generate(p, m), 1, False, "It has one stage on each rank")


def _v_shaped(generate: Callable[[int, int], Schedule]) -> _Family:
    return _Family(lambda p, _v, m: generate(p, m), 2, False, "Its stages go down the ranks and back up")


def _interleaved(generate: Callable[..., Schedule]) -> _Family:
    return _Family(
        lambda p, v, m: generate(p, v, m, round_size=microbatches_per_round(p, m)),
        2,
        True,
        "It takes turns between at least two stages",
        lambda p, m: microbatches_per_round(p, m) is not None,
        "Micro-batches run in equal rounds of at least one for each rank",
    )


_FAMILIES: dict[str, _Family] = {
    "gpipe": _single(generate_gpipe),
    "1f1b": _single(generate_1f1b),
    "interleaved_1f1b": _interleaved(generate_interleaved_1f1b),
    "looped_bfs": _Family(generate_looped_bfs, 2, True, "It loops over at least two stages"),
    "zb_h1": _single(generate_zb_h1),
    "zb_h2": _single(generate_zb_h2),
    "interleaved_zero_bubble": _interleaved(generate_interleaved_zero_bubble),
    "zb_v": _v_shaped(generate_zb_v),
    "v_half": _v_shaped(generate_v_half),
    "v_min": _v_shaped(generate_v_min),
    "dualpipe_v": _Family(
        lambda p, _v, m: generate_dualpipe_v(p, m),
        2,
        False,
        "Its stages go down the ranks and back up",
        lambda p, m: m >= 2 * p,
        "It needs a micro-batch for each stage",
    ),
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
    usual = family.num_virtual_stages
    virtual = usual if num_virtual_stages is None else num_virtual_stages
    if virtual < usual or (virtual > usual and not family.any_more):
        raise PlanError(
            f"Schedule {name} cannot have {virtual} stages on each rank.",
            why=f"{family.why_virtual_stages}.",
            attempt=f"{usual} on each rank, that is {usual * num_ranks} stages on {num_ranks} ranks.",
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
    # A multiple of 2p is legal for every schedule.
    above = next(count for count in range(near + 1, near + 2 * num_ranks + 1) if is_legal(num_ranks, count))
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
