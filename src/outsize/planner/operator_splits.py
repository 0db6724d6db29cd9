"""Completes a plan whose mesh has a tensor-parallel axis with how each operator runs."""

from __future__ import annotations

from dataclasses import replace

from outsize.model.deferred import build_deferred
from outsize.model.source import ModelSource
from outsize.plan.plan import Plan
from outsize.planner.sharding import plan_module_sharding
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
    sharding = plan_module_sharding(module, batch, plan.mesh.tp, overrides=overrides)
    return replace(plan, sharding=sharding)
