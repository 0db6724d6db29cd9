"""A schedule sought for a plan's own stages: never worse than a fixed one, within each rank's memory."""

import pytest

from outsize.cluster.argument import parse_cluster
from outsize.cost.layout import Job, Layout
from outsize.errors import PlanError
from outsize.model.transformer_profile import TransformerConfig, transformer_profile
from outsize.plan.plan import Mesh
from outsize.planner.evaluate import Evaluator
from outsize.planner.plan_schedule import schedule_problem, seek_schedule
from outsize.planner.search import plan_job
from outsize.strategies.base import ALL_LAYOUTS

_CONFIG = TransformerConfig("small", 14, 1024, 16, 128_000, 1024, is_gated=True)
_PROFILE = transformer_profile(_CONFIG)


def _evaluated(memory: str):
    job = Job(_PROFILE, parse_cluster(f"4xA100:{memory}"), global_batch=12, precision="bf16")
    evaluator = Evaluator(job)
    layout = Layout(Mesh(pp=4), 1, 12)
    return job, evaluator.evaluate(layout), evaluator.costs(layout)


@pytest.mark.parametrize("memory", ["6GiB", "80GiB"])
def test_what_is_sought_is_no_worse_than_the_best_fixed_schedule(memory) -> None:
    """In simulation with the predicted, unequal times; a large head makes the last stage the slowest."""
    job, found, costs = _evaluated(memory)
    sought = seek_schedule(job, found, costs)
    problem = schedule_problem(job, found, costs)
    assert sought.lower_bound_s <= sought.objective_s * (1 + 1e-9)
    if sought.best_fixed is not None:
        assert sought.objective_s <= sought.best_fixed.makespan_s * (1 + 1e-9)
    peaks = zip(sought.run.peak_activation_bytes, problem.memory_limit_bytes, strict=True)
    assert all(peak <= limit for peak, limit in peaks)


def test_the_problem_holds_the_predicted_times_and_the_memory_left_for_activations() -> None:
    """Sums over stages are those of the blocks; limits leave out state, temporaries and reserve."""
    job, found, costs = _evaluated("80GiB")
    problem = schedule_problem(job, found, costs)
    forward = sum(stage.forward_s for stage in problem.times.stages)
    weight = sum(stage.weight_gradient_s for stage in problem.times.stages)
    assert forward == pytest.approx(costs.whole_forward_s)
    assert weight == pytest.approx(float(costs.weight_s.sum()))
    for limit, memory in zip(problem.memory_limit_bytes, found.estimate.memory, strict=True):
        others = sum(memory.values()) - memory["activations"]
        assert limit == job.cluster.devices[0].memory_bytes - others


def test_a_plan_under_the_sought_schedule_says_what_its_step_takes() -> None:
    """Parts add up to the step; a single stage and a huge pipeline keep their fixed schedule."""
    wishes = {"global_batch": 12, "precision": "bf16", "space": ALL_LAYOUTS, "schedule": "synthesised"}
    result = plan_job(_PROFILE, parse_cluster("4xA100"), mesh=Mesh(pp=4), num_microbatches=12, **wishes)
    prediction = result.best.prediction
    assert result.sought is not None
    assert prediction.step_time_s == pytest.approx(sum(prediction.time_by_part_s.values()))
    assert prediction.step_time_s >= result.sought.objective_s
    assert plan_job(_PROFILE, parse_cluster("1xA100"), **wishes).sought is None


def test_a_schedule_that_is_not_known_is_refused_with_the_known_ones() -> None:
    """By name, before any search."""
    with pytest.raises(PlanError, match=r"zb_h1.*synthesised"):
        plan_job(_PROFILE, parse_cluster("4xA100"), global_batch=8, schedule="fastest")


def test_a_forced_schedule_is_the_plans() -> None:
    """Also one that needs two stages a rank, which the space alone would not allow."""
    for schedule, virtual in (("gpipe", 1), ("zb_h1", 1), ("zb_v", 2)):
        plan = plan_job(
            _PROFILE, parse_cluster("4xA100"), global_batch=8, schedule=schedule, mesh=Mesh(pp=4)
        ).best
        assert plan.schedule.name == schedule
        assert plan.schedule.num_virtual_stages == virtual
