"""Turns an evaluated layout into a plan."""

from __future__ import annotations

from outsize.cluster.topology import Cluster
from outsize.cost.layout import Job, Layout
from outsize.model.profile import BlockProfile
from outsize.plan.plan import Mesh, Plan, Prediction, ScheduleSpec, StageSpec, Verdict
from outsize.planner.evaluate import Evaluated

__all__ = ["build_plan", "strategy_of"]

_MAX_RANKS_LISTED = 256


def strategy_of(mesh: Mesh, cluster: Cluster) -> str:
    """Return the name of the strategy that a mesh is."""
    axes = [axis for axis, degree in mesh.degrees.items() if degree > 1]
    if len(axes) > 1:
        return "combined"
    spans = len(cluster.machines) > 1 and mesh.dp > len(cluster.machines[0].devices)
    single = {"pp": "pipeline_parallel", "tp": "tensor_parallel", "fsdp": "fully_sharded", "ep": "combined"}
    return single.get(axes[0] if axes else "dp", "multi_worker_mirrored" if spans else "mirrored")


def build_plan(job: Job, found: Evaluated, strategy: str, verdicts: tuple[Verdict, ...]) -> Plan:
    """Return the plan of an evaluated layout, with its predictions."""
    layout = found.layout
    emulated = job.cluster.weakest_device()
    return Plan(
        strategy=strategy,
        mesh=layout.mesh,
        stages=_stages(job, found),
        schedule=ScheduleSpec(layout.schedule, layout.num_microbatches, layout.num_virtual_stages),
        global_batch=job.global_batch,
        model=job.profile.name,
        cluster=job.cluster.argument,
        precision=job.precision,
        optimizer=job.optimizer,
        state_sharding=layout.state_sharding,
        sequence_parallel=layout.sequence_parallel,
        device_memory_bytes=emulated.memory_bytes if emulated.is_emulated else None,
        prediction=_prediction(job, found),
        verdicts=verdicts,
        model_fingerprint=job.profile.fingerprint,
        rung=job.profile.rung,
        rung_reason=job.profile.rung_reason,
    )


def _stages(job: Job, found: Evaluated) -> tuple[StageSpec, ...]:
    blocks = job.profile.blocks
    stages = []
    for chunk in range(found.layout.num_chunks):
        held = [blocks[index] for index in found.assignment.blocks_of(chunk)]
        again = tuple(
            blocks[index].name
            for index in found.assignment.blocks_of(chunk)
            if found.assignment.recompute[index] != "none"
        )
        stages.append(
            StageSpec(
                index=chunk,
                begins_at=held[0].cut_label if chunk else "",
                blocks=tuple(block.name for block in held),
                num_parameters=sum(block.num_parameters for block in held),
                recompute=again,
                tied=_tied(held),
            )
        )
    return tuple(stages)


def _tied(held: list[BlockProfile]) -> tuple[str, ...]:
    own = {name for block in held for name in block.parameter_names}
    used = dict.fromkeys(name for block in held for name in block.tied_parameter_names)
    return tuple(name for name in used if name not in own)


def _prediction(job: Job, found: Evaluated) -> Prediction:
    estimate = found.estimate
    tokens = job.global_batch * job.profile.tokens_per_sample
    return Prediction(
        peak_memory_bytes=estimate.peak_memory_bytes,
        memory_by_rank=_by_rank(found.layout, estimate.memory),
        step_time_s=estimate.step_time_s,
        time_by_part_s=estimate.by_part_s,
        tokens_per_s=tokens / estimate.step_time_s if estimate.step_time_s else 0.0,
    )


def _by_rank(layout: Layout, memory: tuple[dict[str, int], ...]) -> tuple[dict[str, int], ...]:
    world_size = layout.mesh.world_size
    if world_size > _MAX_RANKS_LISTED:
        return memory
    per_stage = world_size // layout.mesh.pp
    return tuple(memory[rank // per_stage] for rank in range(world_size))
