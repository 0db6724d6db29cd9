"""Evaluates layouts: cuts the stages, estimates time and memory, and keeps the best of many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from outsize.cost.blocks import BlockCosts, estimate_block_costs
from outsize.cost.compute import Conditions, Shards, estimate_block_s
from outsize.cost.idle_share import idle_share
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.precision import element_bytes
from outsize.cost.replicas import gather_wait_s, optimizer_s, reduce_wait_s
from outsize.cost.step import StepEstimate, estimate_step, sent_parts, stage_link
from outsize.planner.even_bounds import even_bounds
from outsize.planner.recomputation import recompute_less
from outsize.planner.stages import cut_stages, legal_boundaries
from outsize.strategies.base import MAX_EXPERT_DEGREE, MAX_MICROBATCH_SIZE, Space, Strategy

__all__ = ["Evaluated", "Evaluator", "Outcome"]

_LEAST_GAIN = (
    0.01  # that a layout must promise after ``patience`` evaluations, as much more after each further
)
_NUM_NEAREST = 8  # layouts looked at closely when none fits, to show what comes nearest


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A layout with its stages and what it costs."""

    layout: Layout
    assignment: Assignment
    estimate: StepEstimate
    fits: bool

    @property
    def recomputes(self) -> bool:
        """Whether any block is recomputed."""
        return set(self.assignment.recompute) != {"none"}


def _rank(found: Evaluated) -> tuple[bool, float]:
    """What fits first, then the faster."""
    return not found.fits, found.estimate.step_time_s


@dataclass(slots=True)
class Outcome:
    """The best layout that fits, or the one that comes nearest; and how good any layout could be."""

    best: Evaluated | None = None
    nearest: Evaluated | None = None
    lower_bound_s: float = math.inf  # no layout looked at is faster than this
    num_layouts: int = 0

    def add(self, other: Outcome) -> None:
        """Take in what a search of further layouts found."""
        if other.best is not None and (
            self.best is None or other.best.estimate.step_time_s < self.best.estimate.step_time_s
        ):
            self.best = other.best
        if other.nearest is not None and (
            self.nearest is None
            or other.nearest.estimate.peak_memory_bytes < self.nearest.estimate.peak_memory_bytes
        ):
            self.nearest = other.nearest
        self.lower_bound_s = min(self.lower_bound_s, other.lower_bound_s)
        self.num_layouts += other.num_layouts

    @property
    def shown(self) -> Evaluated | None:
        """What a verdict is about: the best, else the nearest."""
        return self.best or self.nearest


@dataclass
class Evaluator:
    """Evaluates layouts of one job, costing each (degrees, micro-batch size) once."""

    job: Job
    allows_recompute: bool = False
    bounds: tuple[int, ...] | None = None  # pinned stage cuts
    patience: int = 100  # evaluations until a layout must promise more than to be as fast
    _costs: dict[tuple[object, ...], BlockCosts] = field(default_factory=dict)
    _rooms: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    def costs(self, layout: Layout) -> BlockCosts:
        """Return block costs, which depend on inner degrees and the micro-batch size alone."""
        mesh = layout.mesh
        key = (mesh.tp, mesh.cp, mesh.ep, layout.sequence_parallel, layout.microbatch_size)
        if key not in self._costs:
            self._costs[key] = estimate_block_costs(self.job, layout)
        return self._costs[key]

    def evaluate(self, layout: Layout) -> Evaluated | None:
        """Return the layout with its best stages; None where it has more chunks than blocks.

        Cuts of several chunks a rank are balanced or even, whichever is faster. Where something must be
        recomputed, attention scores alone are tried too (with the same cuts), on each stage in as few blocks
        as its memory asks.
        """
        found = [self._cut(layout, self.bounds)]
        if layout.num_virtual_stages > 1 and self.bounds is None:
            found.append(self._cut(layout, self._even_bounds(layout.num_chunks)))
        best = min((each for each in found if each is not None), key=_rank, default=None)
        if best is None or not self.allows_recompute or not self.costs(layout).has_scores:
            return best
        if best.fits and not best.recomputes:
            return best
        other = self._cut(replace(layout, base_recompute="selective"), best.assignment.bounds)
        return min((each for each in (best, other) if each is not None), key=_rank)

    def _cut(self, layout: Layout, bounds: tuple[int, ...] | None) -> Evaluated | None:
        costs = self.costs(layout)
        cuts = cut_stages(self.job, layout, costs, recompute=self.allows_recompute, bounds=bounds)
        if cuts is None:
            return None
        assignment = cuts.assignment
        if layout.base_recompute == "selective":
            assignment = recompute_less(self.job, layout, costs, assignment)
        estimate = estimate_step(self.job, layout, costs, assignment)
        return Evaluated(layout, assignment, estimate, cuts.fits)

    def _even_bounds(self, num_chunks: int) -> tuple[int, ...] | None:
        """Even cuts, if all of them are legal."""
        bounds = even_bounds(len(self.job.profile.blocks), num_chunks)
        return bounds if bounds is not None and set(bounds) <= self._legal else None

    @cached_property
    def _legal(self) -> set[int]:
        return set(legal_boundaries(self.job.profile))

    def lower_bound_s(self, layout: Layout) -> float:
        """Seconds that no cut of this layout can beat: perfect balance, nothing sent; infinite: cannot fit.

        What a stage waits for gathers is convex in its share of the model, so the mean stage waits least.
        """
        costs, pp = self.costs(layout), layout.mesh.pp
        again = self._least_recompute_s(layout, costs)
        if math.isinf(again):
            return math.inf
        whole = costs.whole_step_s + again + self._least_sends_s(layout, costs)
        if layout.state_sharding == "full":
            whole += pp * gather_wait_s(
                self.job,
                layout,
                parameters=costs.whole_parameters / pp,
                trainable=costs.whole_trainable / pp,
                forward_s=costs.whole_forward_s / pp,
                backward_s=costs.whole_backward_s / pp,
            )
        count, block_s = costs.most_repeated  # some rank holds at least its share of them, rounded up
        pace = max(whole / pp, math.ceil(count / pp) * block_s)
        idle = idle_share(layout, costs.weight_share, ends_together=self.job.software.ends_together)
        passes = layout.num_microbatches * pace + (whole - pace) * idle
        if pp == 1:  # one stage holds everything: what ends the step is known
            passes += self._tail_s(layout, costs)
        return float(passes) * self.job.software.factor / self._fastest_over_weakest

    def _least_sends_s(self, layout: Layout, costs: BlockCosts) -> float:
        """Seconds that all ranks together at least wait for values of a micro-batch and their gradients."""
        if layout.num_chunks == 1:
            return 0.0
        link = stage_link(self.job, layout)
        least = costs.least_output_bytes / sent_parts(self.job, layout) / link.bandwidth_bytes_per_s
        return 2 * (layout.num_chunks - 1) * (least + link.latency_s)

    def _tail_s(self, layout: Layout, costs: BlockCosts) -> float:
        """Seconds after the last backward of a single stage."""
        reduce = reduce_wait_s(
            self.job,
            layout,
            parameters=costs.whole_parameters,
            trainable=costs.whole_trainable,
            backward_s=costs.whole_backward_s + float(costs.backward_communication_s.sum()),
            expert_parameters=float(costs.expert_parameters.sum()),
        )
        return float(reduce + optimizer_s(self.job, layout, costs.whole_trainable))

    def _least_recompute_s(self, layout: Layout, costs: BlockCosts) -> float:
        """Seconds a micro-batch that recomputing takes at least, over all ranks; infinite if it cannot help.

        Rank s has room for (memory - state) / c_s of a micro-batch, c_s in flight; state is taken to lie
        where it costs least room.
        """
        room, most = self._room(layout)
        reserve = self.job.cluster.weakest_device().reserve_bytes
        state = (self.least_bytes(layout) - reserve) * layout.mesh.pp
        lacking = costs.whole_saved_bytes - ((self._largest_bytes - reserve) * room - state / most)
        if lacking <= 0:
            return 0.0
        freed, seconds_per_byte = costs.recompute_rate
        if not self.allows_recompute or lacking > freed:
            return math.inf
        return lacking * seconds_per_byte

    def _room(self, layout: Layout) -> tuple[float, float]:
        """Sum over ranks of 1 / (fewest micro-batches in flight of a chunk), and the most of any chunk."""
        key = (layout.mesh.pp, layout.num_microbatches, layout.schedule, layout.num_virtual_stages)
        if key not in self._rooms:
            counts = [layout.in_flight(stage) for stage in range(layout.mesh.pp)]
            most = max(max(each) for each in counts)
            self._rooms[key] = (sum(1 / min(each) for each in counts), float(most))
        return self._rooms[key]

    @cached_property
    def _largest_bytes(self) -> int:
        return max(device.memory_bytes for device in self.job.cluster.distinct_devices)

    @cached_property
    def _fastest_over_weakest(self) -> float:
        cluster, precision = self.job.cluster, self.job.precision
        fastest = max(device.rate(precision) for device in cluster.distinct_devices)
        return fastest / cluster.weakest_device().rate(precision)

    def least_bytes(self, layout: Layout) -> float:
        """Bytes that some device needs at least, whatever the cuts: the mean state of the stages."""
        costs, per = self.costs(layout), self.job.state
        level, shards = layout.state_sharding, layout.num_state_shards
        parameters = per.parameter / (shards if level == "full" else 1)
        gradients = per.gradient / (shards if level in {"gradients", "full"} else 1)
        states = 0.0 if level == "servers" else per.optimizer_state / shards
        held = costs.whole_parameters * parameters + costs.whole_trainable * (gradients + states)
        return held / layout.mesh.pp + self.job.cluster.weakest_device().reserve_bytes

    def fits_any(self, layouts: Iterable[Layout]) -> bool:
        """Whether some layout fits; the ones that need least are tried first."""
        likely = sorted(layouts, key=self.least_bytes)
        found = (self.evaluate(layout) for layout in likely[:_NUM_NEAREST])
        return any(each is not None and each.fits for each in found)

    def search_by_size(self, strategy: Strategy, space: Space) -> Outcome:
        """Search a strategy's layouts, those on most devices first; on fewer, only if these could win."""
        total = Outcome()
        sizes = {mesh.world_size for mesh, _ in strategy.meshes(self.job, space)}
        for num_devices in sorted(sizes, reverse=True):
            if total.best is not None and self._ideal_s / num_devices >= total.best.estimate.step_time_s:
                break
            layouts = strategy.layouts(self.job, replace(space, num_devices=num_devices))
            total.add(self.search(layouts))
        return total

    @cached_property
    def _ideal_s(self) -> float:
        """Device-seconds that no layout's step can do without: each block at its largest, nothing sent."""
        job, device = self.job, self.job.cluster.weakest_device()
        scale = element_bytes(job.precision) / job.profile.bytes_per_element
        size = min(MAX_MICROBATCH_SIZE, job.global_batch)
        conditions = Conditions(device, job.precision, size, Shards(expert=MAX_EXPERT_DEGREE), scale, 0.0)
        times: dict[tuple[str, int], float] = {}
        total = 0.0
        for block in job.profile.blocks:
            key = (block.kind or block.name, block.num_parameters)
            if key not in times:
                each = estimate_block_s(block, conditions)
                times[key] = each.forward_s + each.backward_s
            total += times[key]
        return total / size * job.global_batch * job.software.factor / self._fastest_over_weakest

    def search(self, layouts: Iterable[Layout], *, cutoff_s: float = math.inf) -> Outcome:
        """Return the fastest layout that fits and takes ``cutoff_s`` at most.

        Evaluates only those that could still win; after ``patience`` of them, only those that could win by
        more than a share that grows with their number, which ``lower_bound_s`` then tells.
        """
        outcome = Outcome()
        ordered, hopeless = [], []
        for layout in layouts:
            outcome.num_layouts += 1
            bound = self.lower_bound_s(layout)
            if self.least_bytes(layout) > self._largest_bytes or math.isinf(bound):
                hopeless.append(layout)
            else:
                ordered.append((bound, layout))
        ordered.sort(key=lambda pair: pair[0])
        unfit: list[Layout] = []
        for count, (bound, layout) in enumerate(ordered):
            best_s = outcome.best.estimate.step_time_s if outcome.best else math.inf
            least_gain = _LEAST_GAIN * max(count / self.patience - 1, 0.0) if best_s <= cutoff_s else 0.0
            if bound >= best_s * (1 - least_gain) or bound > cutoff_s:
                outcome.lower_bound_s = min(outcome.lower_bound_s, bound)
                break
            found = self.evaluate(layout)
            if found is not None:
                self._note(outcome, found, bound, unfit)
        if outcome.best is None:
            outcome.nearest = self._nearest(unfit or hopeless)
        return outcome

    @staticmethod
    def _note(outcome: Outcome, found: Evaluated, bound: float, unfit: list[Layout]) -> None:
        """Keep what was found; cuts of one chunk a rank are exact, others only bounded."""
        is_exact = found.layout.num_virtual_stages == 1 and found.layout.base_recompute == "none"
        if not found.fits:
            unfit.append(found.layout)
        elif outcome.best is None or found.estimate.step_time_s < outcome.best.estimate.step_time_s:
            outcome.best = found
        if found.fits or not is_exact:
            floor = found.estimate.step_time_s if is_exact else bound
            outcome.lower_bound_s = min(outcome.lower_bound_s, floor)

    def _nearest(self, layouts: Sequence[Layout]) -> Evaluated | None:
        """The layout whose neediest device needs least."""
        closest = sorted(layouts, key=self.least_bytes)[:_NUM_NEAREST]
        found = [each for each in map(self.evaluate, closest) if each is not None]
        return min(found, key=lambda each: each.estimate.peak_memory_bytes, default=None)
