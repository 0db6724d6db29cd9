"""From a model factory and a plan to this process's part of the model, ready to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outsize.model.deferred import DeferredModel, build_deferred
from outsize.model.record import record_module
from outsize.model.source import resize_batch
from outsize.plan.plan import Plan
from outsize.runtime.materialise import held_names, materialise_parts
from outsize.runtime.measured_memory import start_measuring
from outsize.runtime.memory_limit import apply_memory_limit, readable_out_of_memory
from outsize.runtime.mesh import ProcessMesh, make_process_mesh
from outsize.runtime.microbatches import BatchSplitter
from outsize.runtime.optimizer import build_optimizer
from outsize.runtime.parallel_model import Execution, HeldParameters, ParallelModel
from outsize.runtime.runnable import check_runnable
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
    check_runnable(plan)
    mesh = make_process_mesh(plan.mesh, torch.device(device))
    deferred = build_deferred(factory, seed=plan.seed)
    microbatch = resize_batch(sample_batch, plan.microbatch_size)

    def place() -> StagePlacement:
        """Record the module in its present mode, training or not, and cut the recording into stages."""
        with torch.enable_grad():
            return place_stages(plan, record_module(deferred.module, microbatch))

    def make_execution(placement: StagePlacement) -> Execution:
        splitter = BatchSplitter(placement.program, plan, mesh.coordinates["dp"], mesh.device)
        return Execution(placement.make_executor(deferred, mesh), splitter)

    placement = place()
    memory = start_measuring(mesh.device)
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
        memory=memory,
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
