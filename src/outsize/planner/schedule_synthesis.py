"""Finds a schedule for measured or predicted times that is never worse than the best fixed one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import inf

from outsize.errors import DoesNotFitError, PlanError
from outsize.plan.actions import Schedule
from outsize.plan.schedule_simulation import SimulatedRun, simulate
from outsize.plan.schedules import SCHEDULE_NAMES, make_schedule
from outsize.plan.schedules.split_backward import split_backward_actions
from outsize.planner.list_scheduling import Policy, build_schedule
from outsize.planner.schedule_bound import estimate_lower_bound_s
from outsize.planner.schedule_improvement import improve_rows
from outsize.planner.schedule_problem import ScheduleProblem
from outsize.planner.schedule_timing import Rows, ScheduleTiming
from outsize.units import format_bytes

__all__ = ["SynthesisedSchedule", "fixed_schedules", "synthesise_schedule"]

# Tried as shares of the depth that fills the memory (see `Policy`), the likeliest first: less leaves room for
# held back Ws, more lets forwards wait for whatever room there is.
_DEPTH_SHARES = (1.0, 0.85, 1.3, 0.75, 1.16, 0.93, 1.55)
_FILL_TOLERANCES = (0.5, 1.0, 0.0)
_HOLD_BACKS = (0.0, 1.0, 1.5, 2.0, 2.5, 2.75, 3.0, 4.0)  # Ws held back for each rank before: ZB-H1 has 1
_BUILT_ACTIONS = 500_000  # for schedules built by policy: a few seconds, whatever their size
_TIMED_ACTIONS = 1_000_000  # for the improvement of one schedule: about a second, whatever its size
_NUM_IMPROVED = 3
_EQUAL = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class SynthesisedSchedule:
    """The schedule found, beside the best fixed one and the time that none can beat."""

    run: SimulatedRun
    objective_s: float
    best_fixed: SimulatedRun | None  # None where no fixed schedule fits in memory
    lower_bound_s: float

    @property
    def schedule(self) -> Schedule:
        """The schedule itself; it has a fixed schedule's name if none better was found."""
        return self.run.schedule

    @property
    def gap(self) -> float:
        """How much longer than the lower bound, as a share of it: 0 is proven to be the best there is."""
        return max(0.0, self.objective_s / self.lower_bound_s - 1)  # rounding may put the two in either order


def synthesise_schedule(problem: ScheduleProblem) -> SynthesisedSchedule:
    """Return the best schedule found for the problem's objective; deterministic, in seconds.

    Starts from every fixed schedule of this placement and from lists built for these times, keeps what fits
    in memory, and improves the best few on their critical path until the lower bound is reached or the
    budget is spent. As the fixed schedules are among the candidates, none of them is better.

    Raises:
        DoesNotFitError: a rank cannot hold one micro-batch on each of its stages.
    """
    _check_one_microbatch_fits(problem)
    timing = ScheduleTiming(problem)
    fixed = _Candidates(timing)
    for schedule in fixed_schedules(problem):
        fixed.add(schedule)
    candidates = _Candidates(timing, fixed.found)
    bound_s = estimate_lower_bound_s(problem)
    for schedule in _built_schedules(problem):
        candidates.add(schedule)
        if candidates.best_s() <= bound_s * _EQUAL:
            break
    _improve(timing, candidates, bound_s)
    return SynthesisedSchedule(
        run=candidates.best_run(),
        objective_s=candidates.best_s(),
        best_fixed=fixed.best_run() if fixed.found else None,
        lower_bound_s=bound_s,
    )


def fixed_schedules(problem: ScheduleProblem) -> Iterator[Schedule]:
    """Yield every fixed schedule that has the problem's placement, whatever memory it needs."""
    num_virtual, rest = divmod(problem.num_stages, problem.num_ranks)
    for name in SCHEDULE_NAMES if not rest else ():
        try:
            schedule = make_schedule(
                name,
                num_ranks=problem.num_ranks,
                num_microbatches=problem.num_microbatches,
                num_virtual_stages=num_virtual,
            )
        except PlanError:
            continue  # not for this number of stages or micro-batches
        if schedule.stage_to_rank == problem.stage_to_rank:
            yield schedule


class _Candidates:
    """Schedules within the memory limits by value; of those that are worth the same the first is kept."""

    def __init__(
        self, timing: ScheduleTiming, found: Mapping[tuple[float, float], tuple[str, Rows]] | None = None
    ) -> None:
        self.timing = timing
        self.found = dict(found or {})

    def add(self, schedule: Schedule) -> None:
        """Take the schedule in if it runs and keeps to the limits."""
        rows = self.timing.encode(schedule)
        limits = self.timing.problem.memory_limit_bytes
        if any(self.timing.peak_bytes(row) > limit for row, limit in zip(rows, limits, strict=True)):
            return
        starts = self.timing.start_times(rows)
        if starts is not None:
            self.found.setdefault(self.timing.value(rows, starts), (schedule.name, rows))

    def best_s(self) -> float:
        """Objective of the best; infinite where there is none."""
        return min(self.found, default=(inf, 0.0))[0]

    def best_run(self) -> SimulatedRun:
        """Simulate the best."""
        problem = self.timing.problem
        name, rows = self.found[min(self.found)]
        return simulate(self.timing.decode(rows, name), problem.times, problem.activations)


def _improve(timing: ScheduleTiming, candidates: _Candidates, bound_s: float) -> None:
    for value in sorted(candidates.found)[:_NUM_IMPROVED]:
        if candidates.best_s() <= bound_s * _EQUAL:
            return
        _name, rows = candidates.found[value]
        max_timings = max(1, _TIMED_ACTIONS // sum(len(row) for row in rows))
        candidates.add(timing.decode(improve_rows(timing, rows, max_timings=max_timings), "synthesised"))


def _built_schedules(problem: ScheduleProblem) -> Iterator[Schedule]:
    full = _depth_that_fills_memory(problem)
    depths = (*(share * full for share in _DEPTH_SHARES), _depth_of_round_trip(problem), 1.0)
    if problem.num_stages == problem.num_ranks:
        for depth, hold_back in product(depths, _HOLD_BACKS):
            yield _warm_up_and_hold_back(problem, depth, hold_back)
    num_built = max(1, _BUILT_ACTIONS // (3 * problem.num_stages * problem.num_microbatches))
    for depth, forwards_first, tolerance in islice(
        product(depths, (True, False), _FILL_TOLERANCES), num_built
    ):
        yield build_schedule(problem, Policy(forwards_first, tolerance, depth))


def _depth_of_round_trip(problem: ScheduleProblem) -> float:
    """Return how many forwards a stage can run while a micro-batch goes to the next stage and back."""
    stages, transfer_s = problem.times.stages, problem.times.transfer_s
    forward_s = sum(stage.forward_s for stage in stages)
    trip_s = forward_s + sum(stage.input_gradient_s for stage in stages) + 2 * sum(transfer_s)
    return trip_s / forward_s if forward_s else 1.0


def _depth_that_fills_memory(problem: ScheduleProblem) -> float:
    """Return the depth at which the rank with least room is full of activations (see `Policy`)."""
    depths = []
    for rank, limit in enumerate(problem.memory_limit_bytes):
        stages = [stage for stage, holder in enumerate(problem.stage_to_rank) if holder == rank]
        num_after = [problem.num_stages - 1 - stage for stage in stages]
        bytes_of = [problem.activations[stage].forward_bytes for stage in stages]
        slope = sum(after * size for after, size in zip(num_after, bytes_of, strict=True))
        if slope:
            depths.append((limit - sum(bytes_of)) / slope)
    return min(min(depths, default=1.0), float(problem.num_microbatches))


def _warm_up_and_hold_back(problem: ScheduleProblem, depth: float, hold_back: float) -> Schedule:
    """Return lists like ZB-H1's and ZB-H2's, each rank with ``depth`` Fs in front for every rank after it
    and ``hold_back`` Ws held back for every rank before it, as far as its memory allows.
    """
    rows = []
    for rank, limit in enumerate(problem.memory_limit_bytes):
        stage = problem.stage_to_rank.index(rank)
        activation = problem.activations[stage]
        num_warmup = int(depth * (problem.num_ranks - 1 - stage) + 1e-9)
        num_warmup = min(num_warmup, limit // max(1, activation.forward_bytes) - 1)
        room = limit - (num_warmup + 1) * activation.forward_bytes
        num_held_back = min(int(hold_back * stage + 1e-9), room // max(1, activation.weight_gradient_bytes))
        rows.append(
            split_backward_actions(
                range(stage, stage + 1),
                problem.num_microbatches,
                round_size=problem.num_microbatches,
                num_warmup=num_warmup,
                num_held_back=num_held_back,
            )
        )
    return Schedule("synthesised", problem.num_microbatches, problem.stage_to_rank, tuple(rows))


def _check_one_microbatch_fits(problem: ScheduleProblem) -> None:
    for rank, limit in enumerate(problem.memory_limit_bytes):
        stages = [stage for stage, holder in enumerate(problem.stage_to_rank) if holder == rank]
        needed = sum(problem.activations[stage].forward_bytes for stage in stages)
        if needed > limit:
            raise DoesNotFitError(
                f"Rank {rank} cannot hold the activations of one micro-batch.",
                why=f"its stages keep {format_bytes(needed)}, it has {format_bytes(limit)} for them.",
                attempt="smaller micro-batches, recomputation, or more stages.",
            )
