"""Completes a plan whose mesh has a tensor-parallel axis with how each operator runs."""

from __future__ import annotations

from dataclasses import replace

from outsize.cluster.argument import parse_cluster
from outsize.model.deferred import build_deferred
from outsize.model.source import ModelSource
from outsize.plan.plan import Plan
from outsize.planner.sharding import plan_module_sharding
from outsize.planner.sharding_costs import (
    ACTIVATION_READS,
    GLOO_SCATTER_PASSES,
    PARAMETER_READS,
    ShardingCosts,
)
from outsize.planner.sharding_overrides import ShardingOverrides

__all__ = ["add_operator_splits"]


def add_operator_splits(plan: Plan, source: ModelSource, overrides: ShardingOverrides | None = None) -> Plan:
    """Return the plan with the split of every operator over its ``tp`` axis; others stay as they are.

    Raises:
        PlanError: no operator of the model can be split over that many devices, or an override does not fit.
    """
    if plan.mesh.tp == 1:
        return plan
    module = build_deferred(source.factory).module
    batch = source.sample_batch(plan.microbatch_size)
    sharding = plan_module_sharding(module, batch, plan.mesh.tp, costs=_costs(plan), overrides=overrides)
    return replace(plan, sharding=sharding)


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
