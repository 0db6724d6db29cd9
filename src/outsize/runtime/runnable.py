"""Which plans this runtime can train."""

from __future__ import annotations

from torch import nn

from outsize.cost.layout import STATE_SHARDINGS
from outsize.errors import ModelError, PlanError
from outsize.plan.plan import Plan
from outsize.plan.plan_values import check_plan_values

__all__ = ["check_runnable", "check_trainable"]


def check_runnable(plan: Plan) -> None:
    """Refuse what a plan can say and this runtime cannot do.

    Raises:
        PlanError: with what is not possible, and what is.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"The plan is {type(plan).__name__}, not a Plan.",
            attempt="outsize.plan.files.load_plan(path), for a file that `outsize plan --save` wrote.",
        )
    check_plan_values(plan)
    not_yet = [axis for axis in ("cp", "ep") if getattr(plan.mesh, axis) > 1]
    for has, what in (
        (not_yet, f"a mesh with {', '.join(not_yet)}"),
        (
            plan.state_sharding not in STATE_SHARDINGS,
            f"state sharding {plan.state_sharding!r}",
        ),
        (plan.sequence_parallel, "sequence-parallel activations"),
        (
            plan.mesh.tp != (plan.sharding.degree if plan.sharding else 1),
            f"a mesh with tp {plan.mesh.tp}, and holds operator splits for "
            f"{plan.sharding.degree if plan.sharding else 'none'}",
        ),
        (
            plan.sharding is not None and any(stage.recompute for stage in plan.stages),
            "recomputation of blocks whose operators are split",
        ),
        (
            plan.sharding is not None and plan.batch_norm == "synchronised",
            "synchronised batch norm together with split operators",
        ),
        (plan.precision != "fp32", f"precision {plan.precision!r}"),
    ):
        if has:
            raise PlanError(
                f"The plan asks for {what}, which cannot be trained.",
                why="It trains pipelines, split operators and replicas, in the precision of the parameters.",
                attempt="outsize plan without forcing it.",
            )
    replicas = plan.mesh.dp * plan.mesh.fsdp
    parts = replicas * plan.gradient_accumulation_steps * plan.schedule.num_microbatches
    if plan.global_batch < parts:
        raise PlanError(
            f"A global batch of {plan.global_batch} is too small for {parts} micro-batches.",
            why=f"{replicas} replicas x {plan.gradient_accumulation_steps} accumulation steps x "
            f"{plan.schedule.num_microbatches} micro-batches, each of one sample or more.",
            attempt=f"a global batch of {parts}, or fewer micro-batches.",
        )


def check_trainable(module: nn.Module) -> None:
    """Refuse modules whose gradients the runtime cannot add up.

    Raises:
        ModelError: an embedding has sparse gradients.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ModelError(
                f"The gradients of {name or 'the model'} are sparse.",
                why="Gradients of micro-batches and replicas are added up dense.",
                attempt="sparse=False.",
            )
