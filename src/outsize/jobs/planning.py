"""The plan a job runs under: from a file, or searched for now."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.errors import PlanError
from outsize.model.profile import ModelProfile
from outsize.plan.plan import Mesh, OptimizerSpec, Plan
from outsize.planner.search import PlanningResult, plan_job

if TYPE_CHECKING:
    from outsize.cluster.topology import Cluster
    from outsize.model.source import ModelSource

__all__ = ["PlanRequest", "find_cluster", "find_plan", "plan_profile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the user said of the plan: a file, or a cluster and a batch with any wishes."""

    model: str
    plan: Path | None = None
    cluster: str | None = None
    global_batch: int = 16
    sequence: int | None = None
    strategy: str | None = None
    mesh: Mesh | None = None
    num_microbatches: int | None = None
    row_wise: str | None = None  # tables that stay on parameter servers: names, comma-separated
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    seed: int = 0


def find_plan(request: PlanRequest) -> Plan:
    """Return the plan read from the request's file, or the best one for its model and cluster.

    Raises:
        PlanError: neither or both a plan and a cluster are given, or no such plan is legal.
        DoesNotFitError: nothing fits.
    """
    _check_request(request)
    if request.plan is not None:
        from outsize.plan.files import load_plan

        return load_plan(request.plan)
    from outsize.model.argument import load_model
    from outsize.model.profiling import profile_model

    source = load_model(request.model, sequence=request.sequence)
    profile = profile_model(source)
    if request.row_wise is None:
        return plan_profile(profile, source, request).best
    from outsize.model.tables import without_tables

    best = plan_profile(without_tables(profile, source, request.row_wise), source, request).best
    verdicts = tuple(verdict for verdict in best.verdicts if verdict.name == best.strategy)
    return replace(best, verdicts=verdicts)  # the others would hold the tables


def find_cluster(request: PlanRequest) -> Cluster:
    """Return the cluster that the request, or its plan, names.

    Raises:
        PlanError: neither or both a plan and a cluster are given.
        ClusterError: the cluster is not understood.
    """
    from outsize.cluster.argument import parse_cluster
    from outsize.plan.files import load_plan

    _check_request(request)
    return parse_cluster(request.cluster or load_plan(request.plan).cluster)  # type: ignore[arg-type]


def _check_request(request: PlanRequest) -> None:
    if (request.plan is None) == (request.cluster is None):
        raise PlanError(
            "Give either a plan or a cluster." if request.plan else "There is no plan to train under.",
            why="A plan names its cluster; without a plan one is searched for on the cluster given.",
            attempt="--plan plan.json (made by outsize plan --save), or --cluster 4xcpu:1GiB",
        )


def plan_profile(profile: ModelProfile, source: ModelSource, request: PlanRequest) -> PlanningResult:
    """Plan a model that is already profiled; the best plan holds all that training under it needs."""
    from outsize.cluster.argument import parse_cluster
    from outsize.planner.operator_splits import add_operator_splits

    assert request.cluster is not None
    result = plan_job(
        profile,
        parse_cluster(request.cluster),
        global_batch=request.global_batch,
        optimizer=request.optimizer,
        strategy=request.strategy,
        mesh=request.mesh,
        num_microbatches=request.num_microbatches,
    )
    best = replace(result.best, model=request.model, cluster=request.cluster, seed=request.seed)
    return replace(result, best=add_operator_splits(best, source))
