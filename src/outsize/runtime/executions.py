"""Recordings and executors of one module, by what they hold for: a mode, shapes, numbers read from a batch.

The first batch of a new shape is recorded again; every process sees the same batches, so all do it together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from outsize.model.batch_entries import BatchLayout
from outsize.model.deferred import DeferredModel
from outsize.model.guards import broken_guards
from outsize.model.program import Program
from outsize.model.record import record_module
from outsize.model.slice import Slice
from outsize.model.stage_module import StageModule
from outsize.plan.plan import Plan
from outsize.runtime.gathered_stage import GatheredStage
from outsize.runtime.held_names import HeldNames
from outsize.runtime.materialise import materialise_names, names_used
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.pipeline import PipelineExecutor
from outsize.runtime.stage_executor import OneProcessExecutor, StageExecutor, StageForMicrobatches
from outsize.runtime.stage_placement import StagePlacement, place_stages
from outsize.runtime.state_sharding import StateSharding
from outsize.runtime.tensor_parallel import select_shard

__all__ = ["MAX_KEPT", "Executions"]

MAX_KEPT = 16  # recordings; when batches keep changing, the oldest go


class Executions:
    """Finds, or makes, what runs micro-batches of given shapes in the module's present mode."""

    def __init__(
        self,
        deferred: DeferredModel,
        layout: BatchLayout,
        with_samples: frozenset[str],
        plan: Plan,
        mesh: ProcessMesh,
        state: StateSharding,
        whole: Mapping[str, nn.Parameter] | None = None,
        held: HeldNames | None = None,
    ) -> None:
        self._deferred, self._layout, self._with_samples = deferred, layout, with_samples
        self._plan, self._mesh, self._state = plan, mesh, state
        parameters = deferred.module.named_parameters(remove_duplicate=False)
        self._whole = dict(parameters) if whole is None else whole  # before shards take their place
        self._keeps_outputs = held is not None  # of split operators too; else the loss alone
        self._held = held  # by the first recording, that the plan is for; others may have other operators
        self._placements: list[tuple[object, StagePlacement]] = []  # newest last
        self._stages: dict[StagePlacement, dict[int, StageModule]] = {}
        self._executors: dict[tuple[StagePlacement, ...], StageExecutor] = {}

    @property
    def layout(self) -> BatchLayout:
        """How batches are given to the model."""
        return self._layout

    @property
    def held(self) -> HeldNames:
        """What each pipeline rank holds; known with the first recording."""
        assert self._held is not None
        return self._held

    @property
    def recorded_keys(self) -> list[object]:
        """Mode and shapes of each recording kept, oldest first."""
        return [key for key, _ in self._placements]

    def placement(self, entries: Mapping[str, torch.Tensor]) -> StagePlacement:
        """Return the recording that holds for a micro-batch.

        Raises:
            RecordingError: the module cannot be recorded with this batch.
            PlanError: the plan does not fit this recording.
        """
        key = (
            self._deferred.module.training,
            tuple((name, tuple(value.shape), value.dtype) for name, value in entries.items()),
        )
        for known, placement in self._placements:
            if known == key and not broken_guards(placement.recording, entries):
                return placement
        with torch.enable_grad(), _in_place(self._deferred.module, self._whole):
            recording = record_module(
                self._deferred.module,
                self._batch(entries),
                granularity="blocks" if self._plan.sharding is None else "operators",
                with_samples=self._with_samples,
            )
        made = place_stages(
            self._plan,
            recording,
            self._mesh.coordinates["tp"],
            planned_for=None if self._held is None else self._held.recording,
            keeps_outputs=self._keeps_outputs,
        )
        if self._held is None:
            self._held = HeldNames(self._deferred, made)
        self._held.check(made)
        self._placements.append((key, made))
        if len(self._placements) > MAX_KEPT:
            self._forget(self._placements.pop(0)[1])
        return made

    def for_batches_of(self, layout: BatchLayout, with_samples: frozenset[str]) -> Executions:
        """Return what runs batches of another layout, such as without labels, on the same module.

        All outputs are kept, also where operators are split.
        """
        return Executions(
            self._deferred,
            layout,
            with_samples,
            self._plan,
            self._mesh,
            self._state,
            self._whole,
            self._held,
        )

    @property
    def run_in_step(self) -> bool:
        """Whether all replicas have to run as many micro-batches: they gather parameters together."""
        return self._state.gathers_in_stages

    def executor(self, placements: Sequence[StagePlacement]) -> StageExecutor:
        """Return what runs one pass of the schedule on its first micro-batches, given their recordings."""
        key = tuple(placements)
        if key not in self._executors:
            self._executors[key] = self._make_executor(placements)
        return self._executors[key]

    def materialise(self, names: Sequence[str]) -> None:
        """Give the module the initial values (or shards) of these names that it does not have yet."""
        sharding, rank = self._plan.sharding, self._mesh.coordinates["tp"]
        of_operators = None if sharding is None else select_shard(sharding, rank)

        def select(name: str, whole: torch.Tensor) -> torch.Tensor:
            local = whole if of_operators is None else of_operators(name, whole)
            return self._state.select(name, local)

        device, seed = self._mesh.device, self._plan.seed
        materialise_names(self._deferred, names, device=device, seed=seed, select=select)

    def _make_executor(self, placements: Sequence[StagePlacement]) -> StageExecutor:
        by_microbatch = [self._stage_modules(placement) for placement in placements]
        stages = {
            index: StageForMicrobatches([modules[index] for modules in by_microbatch])
            for index in by_microbatch[0]
        }
        group = self._mesh.group("pp")
        if group is None:
            return OneProcessExecutor([stages[index] for index in sorted(stages)], self._mesh.device)
        schedule = placements[0].schedule.of_first(len(placements))
        return PipelineExecutor(schedule, stages, group, self._mesh.device)

    def _stage_modules(self, placement: StagePlacement) -> dict[int, StageModule]:
        if placement not in self._stages:
            parts = placement.slices_of(self._mesh.coordinates["pp"])
            self.materialise(names_used(self._deferred, parts))  # constant buffers, such as masks
            modules = {part.index: self._stage_module(placement.program, part) for part in parts}
            for index, module in modules.items():
                module.apply_recompute(self._plan.stages[index].recompute)
            self._stages[placement] = modules
        return self._stages[placement]

    def _stage_module(self, program: Program, part: Slice) -> StageModule:
        if self._state.gathers_in_stages:
            return GatheredStage(program, part, self._deferred.module, self._state.unit)
        return StageModule(program, part, self._deferred.module)

    def _batch(self, entries: Mapping[str, torch.Tensor]) -> object:
        args, kwargs = self._layout.restore(entries)
        return kwargs if self._layout.is_keywords else args

    def _forget(self, placement: StagePlacement) -> None:
        self._stages.pop(placement, None)
        self._executors = {key: made for key, made in self._executors.items() if placement not in key}


@contextmanager
def _in_place(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Hold these parameters in the module while inside, so that it is recorded whole and not as a shard."""
    held: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]] = []
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        table = module.get_submodule(owner)._parameters
        held.append((table, leaf, table[leaf]))
        table[leaf] = parameter
    try:
        yield
    finally:
        for table, leaf, parameter_held in reversed(held):  # a shared module has several names for one
            table[leaf] = parameter_held
