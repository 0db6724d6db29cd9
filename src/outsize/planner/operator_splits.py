"""Completes a plan whose mesh has a tensor-parallel axis with how each operator runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from outsize.cluster.argument import parse_cluster
from outsize.model.deferred import build_deferred
from outsize.model.source import ModelSource
from outsize.plan.plan import Plan
from outsize.planner.sharding import MemoryLimit, plan_module_sharding
from outsize.planner.sharding_costs import (
    ACTIVATION_READS,
    GLOO_SCATTER_PASSES,
    PARAMETER_READS,
    ShardingCosts,
)
from outsize.planner.sharding_overrides import ShardingOverrides
from outsize.planner.sharding_problem import LimitError

__all__ = ["add_operator_splits"]


def add_operator_splits(plan: Plan, source: ModelSource, overrides: ShardingOverrides | None = None) -> Plan:
    """Return the plan with the split of every operator over its ``tp`` axis; others stay as they are.

    The split keeps to the memory of the devices where one can: what makes activations small, such as dividing
    the sequence inside attention, is then taken though it costs time.

    Raises:
        PlanError: no operator of the model can be split over that many devices, or an override does not fit.
    """
    if plan.mesh.tp == 1:
        return plan
    module = build_deferred(source.factory).module
    batch = source.sample_batch(plan.microbatch_size)
    search = partial(
        plan_module_sharding, module, batch, plan.mesh.tp, costs=_costs(plan), overrides=overrides
    )
    try:
        sharding = search(memory_limit=_memory_limit(plan))
    except LimitError:  # counted operator by operator it is more than the plan expects
        sharding = search()
    return replace(plan, sharding=sharding)


def _memory_limit(plan: Plan) -> MemoryLimit | None:
    """Return what a device has for parameters with their states and for activations.

    None for pipelines, whose stages differ, and where activations are recomputed.
    """
    is_recomputed = any(stage.recompute for stage in plan.stages)
    if plan.prediction is None or plan.mesh.pp > 1 or is_recomputed or not plan.cluster:
        return None
    (predicted,) = plan.prediction.memory_by_rank[:1] or (None,)
    if not predicted or not predicted["parameters"]:
        return None
    states = sum(predicted[name] for name in ("parameters", "gradients", "optimizer_states"))
    others = predicted["temporaries"] + predicted["communication_buffers"]
    return MemoryLimit(
        available_bytes=parse_cluster(plan.cluster).weakest_device().usable_bytes - others,
        states=states / predicted["parameters"],
    )


def _costs(plan: Plan) -> ShardingCosts:
    """Return the rates of the plan's devices and of the slowest link along the axis."""
    if not plan.cluster:
        return ShardingCosts(plan.mesh.tp)
    cluster = parse_cluster(plan.cluster)
    device, link = cluster.weakest_device(), cluster.span(plan.mesh.ep, plan.mesh.tp).slowest
    return ShardingCosts(
        plan.mesh.tp,
        flops_per_s=device.rate(plan.precision),
        memory_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        link_bytes_per_s=link.bandwidth_bytes_per_s,
        link_latency_s=link.latency_s,
        scatter_passes=GLOO_SCATTER_PASSES if device.is_emulated else 1.0,
        held_parameter_s_per_byte=PARAMETER_READS / device.memory_bandwidth_bytes_per_s,
        held_activation_s_per_byte=ACTIVATION_READS / device.memory_bandwidth_bytes_per_s,
    )
