"""The search against evaluating every layout."""

import pytest

from helpers.profiles import chain_profile
from outsize.cluster.argument import parse_cluster
from outsize.cost.layout import Job
from outsize.model.profile import Amount
from outsize.planner.evaluate import Evaluator
from outsize.strategies.base import ALL_LAYOUTS
from outsize.strategies.registry import ALL_STRATEGIES

_LARGE = {
    "forward_flops": Amount(2e11),
    "backward_flops": Amount(4e11),
    "saved_activation_bytes": Amount(4e8),
}


@pytest.mark.parametrize(
    ("cluster", "memory"),
    [("4xA10", "2GiB"), ("4xA10", "4GiB"), ("4xA10", "12GiB"), ("2x4xA10", "4GiB"), ("8xH100", "12GiB")],
)
def test_the_search_finds_the_best_of_all_layouts(cluster, memory) -> None:
    """Pruning by lower bounds loses nothing: same step time as evaluating every layout of every strategy."""
    profile = chain_profile(6, parameters=8_000_000, **_LARGE)
    job = Job(profile, parse_cluster(f"{cluster}:{memory}"), global_batch=8, precision="bf16")
    layouts = [
        layout
        for strategy in ALL_STRATEGIES
        if strategy.refusal(job) is None
        for layout in strategy.layouts(job, ALL_LAYOUTS)
    ]
    every = [Evaluator(job, allows_recompute=True).evaluate(layout) for layout in layouts]
    times = [each.estimate.step_time_s for each in every if each is not None and each.fits]
    outcome = Evaluator(job, allows_recompute=True).search(layouts)
    assert (outcome.best is None) == (not times)
    if outcome.best is not None:
        assert outcome.best.estimate.step_time_s == pytest.approx(min(times), rel=1e-12)
        assert outcome.lower_bound_s <= min(times) * (1 + 1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_no_layout_that_fits_beats_its_lower_bound(recompute) -> None:
    """The bound counts what must be recomputed to fit, and stays below what any cut takes."""
    profile = chain_profile(6, parameters=8_000_000, **_LARGE)
    job = Job(profile, parse_cluster("2x4xA10:4GiB"), global_batch=8, precision="bf16")
    evaluator = Evaluator(job, allows_recompute=recompute)
    checked = 0
    for strategy in ALL_STRATEGIES:
        for layout in strategy.layouts(job, ALL_LAYOUTS):
            found = evaluator.evaluate(layout)
            if found is not None and found.fits:
                checked += 1
                assert evaluator.lower_bound_s(layout) <= found.estimate.step_time_s * (1 + 1e-9)
                assert evaluator.least_bytes(layout) <= found.estimate.peak_memory_bytes + 1
    assert checked > 50
