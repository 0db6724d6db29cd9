"""From a model factory and a plan to this process's part of the model, ready to train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from outsize.errors import RecordingError
from outsize.model.batch_entries import flatten_batch
from outsize.model.batch_norm import batch_norm_warnings
from outsize.model.deferred import DeferredModel, build_deferred
from outsize.model.program import Program
from outsize.model.source import resize_batch
from outsize.model.written_buffers import written_buffer_warnings
from outsize.plan.plan import Plan
from outsize.runtime.agreement import check_same_model
from outsize.runtime.batch_norm import apply_synchronised_batch_norm
from outsize.runtime.collectives import set_axis_group
from outsize.runtime.device_argument import find_device
from outsize.runtime.executions import Executions
from outsize.runtime.held_names import HeldNames
from outsize.runtime.measured_memory import start_measuring
from outsize.runtime.memory_limit import apply_memory_limit, readable_out_of_memory
from outsize.runtime.mesh import ProcessMesh, make_process_mesh
from outsize.runtime.microbatches import BatchForm, BatchSplitter
from outsize.runtime.model_state import persistent_buffers
from outsize.runtime.optimizer import build_optimizer
from outsize.runtime.parallel_model import HeldState, ParallelModel
from outsize.runtime.runnable import check_runnable, check_trainable
from outsize.runtime.state_sharding import StateSharding
from outsize.runtime.tensor_parallel import parameter_placements
from outsize.runtime.tied_parameters import TiedParameters

__all__ = ["parallelize"]


def parallelize(
    factory: Callable[[], nn.Module],
    plan: Plan,
    *,
    sample_batch: Any,
    device: torch.device | str = "cpu",
    enforce_memory_limit: bool = False,
    shared_entries: Collection[str] = (),
) -> ParallelModel:
    """Build this process's part of the model under ``plan``.

    Call it on every process, after ``torch.distributed.init_process_group`` where the plan has more than one.
    ``sample_batch`` is a batch of any number of samples, like those to come: entries with as many rows as its
    first one are cut into micro-batches along them, but for ``shared_entries``. With ``enforce_memory_limit``
    the process may allocate no more than the plan's ``device_memory_bytes`` from here on (emulated devices).

    Raises:
        PlanError: the plan asks for what cannot run, or was made for another model.
        BatchError: the sample batch holds no tensor or no sample.
        ModelError, RecordingError: the model cannot be built or recorded, or is another on some process.
        DoesNotFitError: this process's part does not fit its device.
        LaunchError: the number of processes is not the plan's, or there is no such device.
    """
    check_runnable(plan)
    mesh = make_process_mesh(plan.mesh, find_device(device))
    tensor_parallel_group = mesh.group("tp")
    if tensor_parallel_group is not None:
        set_axis_group("tp", tensor_parallel_group, plan.seed)
    deferred = build_deferred(factory, seed=plan.seed)
    check_trainable(deferred.module)
    check_same_model(deferred, mesh.device)
    _arrange_batch_norm(deferred.module, plan, mesh)
    entries, layout = flatten_batch(sample_batch)
    form = BatchForm.of(entries, shared_entries)
    state = StateSharding(deferred, plan, mesh)
    executions = Executions(deferred, layout, form.with_samples, plan, mesh, state)
    microbatch = flatten_batch(resize_batch(sample_batch, plan.microbatch_size, form.with_samples))[0]
    placement = executions.placement(microbatch)
    _check_loss(placement.recording)
    if mesh.rank == 0:
        _show_warnings(placement.recording, deferred.module, plan)
    memory = start_measuring(mesh.device)
    if enforce_memory_limit and plan.device_memory_bytes is not None:
        apply_memory_limit(plan.device_memory_bytes)
    with readable_out_of_memory(mesh.rank, plan.device_memory_bytes, "building its part of the model"):
        executions.materialise(executions.held.by_rank[mesh.coordinates["pp"]])

    held = _held_state(deferred, executions.held, plan, mesh, state)
    return ParallelModel(
        plan=plan,
        mesh=mesh,
        module=deferred.module,
        held=held,
        memory=memory,
        optimizer=build_optimizer(plan.optimizer, held.parameters.values()),
        executions=executions,
        splitter=BatchSplitter(form, plan, executions, mesh.replica, mesh.device),
    )


def _check_loss(recording: Program) -> None:
    if recording.loss_value is None:
        raise RecordingError(
            "The model returns no loss.",
            why="Training differentiates the output named loss, a scalar, or the only scalar.",
            attempt="a sample batch with labels, or a module whose forward returns the loss.",
        )


def _show_warnings(recording: Program, module: nn.Module, plan: Plan) -> None:
    shown = list(recording.warnings)
    if plan.global_batch > plan.microbatch_size:
        shown += written_buffer_warnings(recording, module)
    for warning in shown:
        warnings.warn(warning, stacklevel=3)


def _arrange_batch_norm(module: nn.Module, plan: Plan, mesh: ProcessMesh) -> None:
    """Let batch norm see all replicas where the plan says so, else say what it sees."""
    group = mesh.replica_group
    if plan.batch_norm == "synchronised" and group is not None:
        apply_synchronised_batch_norm(module, group)
    elif mesh.rank == 0 and plan.global_batch > plan.microbatch_size:
        for warning in batch_norm_warnings(module):
            warnings.warn(warning, stacklevel=3)


def _held_state(
    deferred: DeferredModel, held: HeldNames, plan: Plan, mesh: ProcessMesh, state: StateSharding
) -> HeldState:
    parameters = dict(deferred.module.named_parameters(remove_duplicate=False))
    parameters_by_rank = [[name for name in names if name in parameters] for names in held.by_rank]
    here = mesh.coordinates["pp"]
    in_modules = {name: parameters[name] for name in parameters_by_rank[here]}
    return HeldState(
        parameters={name: state.trained(name, parameter) for name, parameter in in_modules.items()},
        in_modules=in_modules,
        buffers=persistent_buffers(deferred.module, set(held.by_rank[here])),
        placements=parameter_placements(plan.sharding) if plan.sharding is not None else {},
        tied=TiedParameters(mesh, parameters_by_rank),
        sharding=state,
    )
