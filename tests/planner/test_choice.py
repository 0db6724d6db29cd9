"""The planner's own choice against published configurations: never predicted slower."""

from dataclasses import replace

import pytest

from outsize.cluster.argument import parse_cluster
from outsize.cost.layout import Job, Layout
from outsize.model.transformer_profile import TransformerConfig, transformer_profile
from outsize.plan.plan import Mesh
from outsize.planner.choice import choice_ratios
from outsize.planner.evaluate import Evaluator
from outsize.planner.published_runs import PublishedRun
from outsize.planner.validation import predict_run
from outsize.strategies.base import ALL_LAYOUTS
from outsize.strategies.registry import ALL_STRATEGIES

_DENSE = TransformerConfig("dense", 14, 1024, 16, 32000, 1024, is_gated=True)
_EXPERTS = TransformerConfig(
    "experts",
    6,
    1024,
    16,
    32000,
    1024,
    is_gated=True,
    num_experts=16,
    num_active_experts=2,
    expert_hidden=512,
)


def _run(config: TransformerConfig, layout: Layout, recompute: str = "none") -> PublishedRun:
    batch = layout.num_replicas * layout.microbatch_size * layout.num_microbatches
    job = Job(transformer_profile(config), parse_cluster("8xH100"), batch, precision="bf16")
    return PublishedRun(2, "source", "outsize", job, layout, recompute, 1.0, None, False, False)


_LAYOUTS = {
    "zero bubble": (_DENSE, Layout(Mesh(pp=8), 1, 24, schedule="zb_h1"), "none"),
    "searched in twice the memory": (_DENSE, Layout(Mesh(pp=8), 1, 24, schedule="zb_2p"), "none"),
    "V-shaped": (_DENSE, Layout(Mesh(pp=4, dp=2), 2, 8, schedule="zb_v", num_virtual_stages=2), "none"),
    "interleaved": (
        _DENSE, Layout(Mesh(pp=4, dp=2), 1, 8, schedule="interleaved_1f1b", num_virtual_stages=4), "none",
    ),
    "sharded states": (_DENSE, Layout(Mesh(fsdp=8), 4, 2, state_sharding="optimizer_states"), "full"),
    "experts alone": (_EXPERTS, Layout(Mesh(ep=8), 4, 2), "none"),
    "a batch of odd size": (_DENSE, Layout(Mesh(fsdp=8), 56, 1, state_sharding="full"), "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", _LAYOUTS)
def test_the_choice_is_never_slower_than_what_was_published(name) -> None:
    """Each kind of published layout lies in the space that is searched."""
    config, layout, recompute = _LAYOUTS[name]
    ratios = list(choice_ratios([predict_run(_run(config, layout, recompute))], num_workers=1))
    assert len(ratios) == 1
    assert ratios[0] >= 1 - 1e-9


def test_searching_sizes_of_clusters_one_after_the_other_loses_nothing() -> None:
    """The largest first, and smaller ones only where they could win: the same best as all at once."""
    job = _run(_DENSE, Layout(Mesh(dp=8), 2, 1)).job
    for batch in (2, 16):
        smaller = replace(job, global_batch=batch)
        for strategy in ALL_STRATEGIES:
            evaluator = Evaluator(smaller, allows_recompute=True)
            by_size = evaluator.search_by_size(strategy, ALL_LAYOUTS).best
            at_once = evaluator.search(strategy.layouts(smaller, ALL_LAYOUTS)).best
            assert (by_size is None) == (at_once is None)
            if by_size is not None:
                assert by_size.estimate.step_time_s == pytest.approx(at_once.estimate.step_time_s, rel=1e-9)
