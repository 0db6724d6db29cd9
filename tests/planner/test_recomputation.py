"""Recomputing attention scores alone, as a choice of each stage."""

from dataclasses import replace
from itertools import pairwise

import pytest

from outsize.cluster.argument import parse_cluster
from outsize.cost.layout import Job, Layout
from outsize.model.transformer_profile import TransformerConfig, transformer_profile
from outsize.plan.plan import Mesh
from outsize.planner.evaluate import Evaluator

_CONFIG = TransformerConfig(
    "unfused", 16, 2048, 16, 32000, 2048, learned_positions=True, fused_attention=False, dropout=True
)


def _job(memory: str) -> Job:
    return Job(
        transformer_profile(_CONFIG), parse_cluster(f"4xA100:{memory}"), global_batch=16, precision="bf16"
    )


_LAYOUT = Layout(Mesh(pp=4), 1, 16)


def test_scores_are_recomputed_before_whole_blocks_and_only_where_memory_asks() -> None:
    """1F1B keeps more on the first rank than on the last: the first recomputes, the last keeps everything."""
    roomy = Evaluator(_job("80GiB"), allows_recompute=True).evaluate(_LAYOUT)
    tight = Evaluator(_job("9GiB"), allows_recompute=True).evaluate(_LAYOUT)
    assert set(roomy.assignment.recompute) == {"none"}
    assert tight.fits
    assert "selective" in tight.assignment.recompute
    bounds = tight.assignment.bounds
    stages = [tight.assignment.recompute[first:stop] for first, stop in pairwise(bounds)]
    assert stages[0].count("selective") > stages[3].count("selective")
    assert "full" not in tight.assignment.recompute
    assert tight.assignment.recompute[0] == "none"  # an embedding has no scores


def test_recomputing_scores_is_faster_than_recomputing_blocks() -> None:
    """The same memory and layout with scores left alone takes longer."""
    job = _job("9GiB")
    blocks = tuple(
        replace(block, selective_saved_bytes=block.saved_activation_bytes) for block in job.profile.blocks
    )
    whole = replace(job, profile=replace(job.profile, blocks=blocks))
    selective = Evaluator(job, allows_recompute=True).evaluate(_LAYOUT)
    full = Evaluator(whole, allows_recompute=True).evaluate(_LAYOUT)
    assert selective.fits
    assert full.fits
    assert selective.estimate.step_time_s < full.estimate.step_time_s


@pytest.mark.parametrize("memory", ["8GiB", "9GiB", "11GiB"])
def test_what_is_chosen_fits_each_device(memory) -> None:
    """Giving back what was recomputed never exceeds a device."""
    found = Evaluator(_job(memory), allows_recompute=True).evaluate(_LAYOUT)
    if found.fits:
        limit = parse_cluster(f"4xA100:{memory}").devices[0].memory_bytes
        assert found.estimate.peak_memory_bytes <= limit
