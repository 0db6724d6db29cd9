"""Makes a schedule faster by moving actions on its critical path, one at a time, while that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outsize.plan.actions import ActionKind
from outsize.planner.schedule_problem import Objective
from outsize.planner.schedule_timing import Rows, ScheduleTiming

__all__ = ["improve_rows"]

_DISTANCES = (1, 2, 4, 8)  # how many actions one is moved over
_F, _I, _W, _B = (list(ActionKind).index(kind) for kind in ActionKind)


def improve_rows(timing: ScheduleTiming, rows: Rows, *, max_timings: int) -> Rows:
    """Return lists at least as good, within the same memory limits; deterministic.

    A move takes one of two neighbours on the critical path over the other or a few actions further, or
    joins an I with its W or parts them. The first move that helps is kept, and the search goes on with the
    new critical path; it ends when no move helps or after ``max_timings`` tries.
    """
    starts = timing.start_times(rows)
    assert starts is not None, "only schedules that run are improved"
    best = timing.value(rows, starts)
    limits = timing.problem.memory_limit_bytes
    num_timings = 0
    improved = True
    while improved:
        improved = False
        for rank, row in _moves(timing, rows, starts):
            if timing.peak_bytes(row) > limits[rank]:
                continue
            if num_timings == max_timings:
                return rows
            num_timings += 1
            candidate = [*rows[:rank], row, *rows[rank + 1 :]]
            new_starts = timing.start_times(candidate)
            if new_starts is None:
                continue
            value = timing.value(candidate, new_starts)
            if value < best:
                rows, starts, best, improved = candidate, new_starts, value, True
                break
    return rows


def _moves(timing: ScheduleTiming, rows: Rows, starts: Sequence[float]) -> Iterator[tuple[int, list[int]]]:
    """Yield a rank and its new list for every move on the critical path, from the end of the run."""
    for rank, index in _critical_neighbours(timing, rows, starts):
        row = rows[rank]
        before, after = row[index - 1], row[index]
        if before % 4 == _I and after == before - _I + _W:
            yield rank, [*row[: index - 1], before - _I + _B, *row[index + 1 :]]
            continue
        for at in (index - 1, index):
            if row[at] % 4 == _B:
                pair = row[at] - _B
                yield rank, [*row[:at], pair + _I, pair + _W, *row[at + 1 :]]
        for distance in _DISTANCES:
            if index - distance >= 0:
                yield rank, _moved(row, index, index - distance)
            if distance > 1 and index - 1 + distance < len(row):
                yield rank, _moved(row, index - 1, index - 1 + distance)
        if before % 4 == _W:
            yield rank, _moved(row, index - 1, len(row) - 1)


def _moved(row: list[int], origin: int, target: int) -> list[int]:
    moved = row.copy()
    moved.insert(target, moved.pop(origin))
    return moved


def _critical_neighbours(
    timing: ScheduleTiming, rows: Rows, starts: Sequence[float]
) -> Iterator[tuple[int, int]]:
    """Yield (rank, index) of actions that wait for nothing but the action before them on their rank.

    Goes back from the last action of the rank that decides the objective, each time to whatever the action
    waited for last.
    """
    ends = [starts[row[-1]] + timing.seconds[row[-1]] for row in rows]
    if timing.problem.objective is Objective.LONGEST_SPAN:
        ends = [end - starts[row[0]] for end, row in zip(ends, rows, strict=True)]
    place = {action: (rank, index) for rank, row in enumerate(rows) for index, action in enumerate(row)}
    rank = max(range(len(rows)), key=ends.__getitem__)
    index = len(rows[rank]) - 1
    while True:
        action = rows[rank][index]
        before = rows[rank][index - 1] if index else action
        if index and starts[before] + timing.seconds[before] == starts[action]:
            yield rank, index
            index -= 1
            continue
        cause = next((place[other] for other in timing.awaited(action) if other in place), None)
        if cause is None:
            return
        rank, index = cause
