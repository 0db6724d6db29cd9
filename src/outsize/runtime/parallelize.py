"""From a model factory and a plan to this process's part of the model, ready to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outsize.errors import PlanError
from outsize.model.deferred import DeferredModel, build_deferred
from outsize.model.record import record_module
from outsize.plan.plan import Plan
from outsize.runtime.materialise import held_names, materialise_parts
from outsize.runtime.memory_limit import apply_memory_limit, readable_out_of_memory
from outsize.runtime.mesh import ProcessMesh, make_process_mesh
from outsize.runtime.microbatches import BatchSplitter, sample_microbatch
from outsize.runtime.optimizer import build_optimizer
from outsize.runtime.parallel_model import Execution, HeldParameters, ParallelModel
from outsize.runtime.stage_placement import StagePlacement, place_stages
from outsize.runtime.tied_parameters import TiedParameters

__all__ = ["parallelize"]


def parallelize(
    factory: Callable[[], nn.Module],
    plan: Plan,
    *,
    sample_batch: Any,
    device: torch.device | str = "cpu",
    enforce_memory_limit: bool = False,
) -> ParallelModel:
    """Build this process's part of the model under ``plan``.

    Call it on every process, after ``torch.distributed.init_process_group`` where the plan has more than one.
    ``sample_batch`` is a batch of any number of samples, like those to come. With ``enforce_memory_limit``
    the process may allocate no more than the plan's ``device_memory_bytes`` from here on (emulated devices).

    Raises:
        PlanError: the plan asks for what cannot run, or was made for another model.
        ModelError, RecordingError: the model cannot be built or recorded.
        DoesNotFitError: this process's part does not fit its device.
        LaunchError: the number of processes is not the plan's.
    """
    _check_runnable(plan)
    mesh = make_process_mesh(plan.mesh, torch.device(device))
    deferred = build_deferred(factory, seed=plan.seed)
    microbatch = sample_microbatch(sample_batch, plan.microbatch_size)

    def place() -> StagePlacement:
        """Record the module in its present mode, training or not, and cut the recording into stages."""
        with torch.enable_grad():
            return place_stages(plan, record_module(deferred.module, microbatch))

    def make_execution(placement: StagePlacement) -> Execution:
        splitter = BatchSplitter(placement.program, plan, mesh.coordinates["dp"], mesh.device)
        return Execution(placement.make_executor(deferred, mesh), splitter)

    placement = place()
    if enforce_memory_limit and plan.device_memory_bytes is not None:
        apply_memory_limit(plan.device_memory_bytes)
    with readable_out_of_memory(mesh.rank, plan.device_memory_bytes, "building its part of the model"):
        own = placement.slices_of(mesh.coordinates["pp"])
        materialise_parts(deferred, own, device=mesh.device, seed=plan.seed)
    held = _held_parameters(deferred, placement, mesh)
    return ParallelModel(
        plan=plan,
        mesh=mesh,
        module=deferred.module,
        held=held,
        optimizer=build_optimizer(plan.optimizer, held.by_name.values()),
        training=make_execution(placement),
        make_evaluation=lambda: make_execution(place()),
    )


def _held_parameters(deferred: DeferredModel, placement: StagePlacement, mesh: ProcessMesh) -> HeldParameters:
    parameters = dict(deferred.module.named_parameters(remove_duplicate=False))
    by_rank = [
        [
            deferred.ties.get(name, name)
            for name in held_names(deferred, placement.slices_of(rank))
            if name in parameters
        ]
        for rank in range(mesh.mesh.pp)
    ]
    tied = TiedParameters(mesh, by_rank)
    own = {name: parameters[name] for name in by_rank[mesh.coordinates["pp"]]}
    return HeldParameters(own, tied, tied.is_counted_here)


def _check_runnable(plan: Plan) -> None:
    """Refuse what plans can say and this runtime cannot do."""
    not_yet = [axis for axis in ("fsdp", "cp", "ep", "tp") if getattr(plan.mesh, axis) > 1]
    for has, what in (
        (not_yet, f"a mesh with {', '.join(not_yet)}"),
        (plan.state_sharding != "none", f"state sharding {plan.state_sharding!r}"),
        (plan.sequence_parallel, "sequence-parallel activations"),
        (plan.precision != "fp32", f"precision {plan.precision!r}"),
    ):
        if has:
            raise PlanError(
                f"The plan asks for {what}, which cannot be trained.",
                why="The runtime trains pipelines and replicas, in the precision of the model's parameters.",
                attempt="outsize plan without forcing it.",
            )
    parts = plan.mesh.dp * plan.gradient_accumulation_steps * plan.schedule.num_microbatches
    if plan.global_batch % parts:
        lower = plan.global_batch // parts * parts
        raise PlanError(
            f"A global batch of {plan.global_batch} cannot be cut into {parts} equal micro-batches.",
            why=f"{plan.mesh.dp} replicas x {plan.gradient_accumulation_steps} accumulation steps x "
            f"{plan.schedule.num_microbatches} micro-batches.",
            attempt=f"a global batch of {f'{lower} or ' if lower else ''}{lower + parts}.",
        )
