"""Plans whose operators are split wherever they can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from helpers.models import make_batch
from outsize.model.deferred import build_deferred
from outsize.model.record import record_module
from outsize.plan.plan import Plan
from outsize.planner.sharding import plan_sharding
from outsize.planner.sharding_costs import ShardingCosts

__all__ = ["split_operators"]


def split_operators(factory: Callable[[], nn.Module], plan: Plan) -> Plan:
    """Return the plan with operator splits searched as if latency were nothing and memory dear."""
    microbatch = make_batch(plan.microbatch_size, seed=0)
    recording = record_module(build_deferred(factory).module, microbatch, granularity="operators")
    costs = ShardingCosts(plan.mesh.tp, link_latency_s=0.0, held_activation_s_per_byte=1e-9)
    return replace(plan, sharding=plan_sharding(recording, plan.mesh.tp, costs=costs))
