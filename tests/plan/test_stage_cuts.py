"""What a user hears who pins a cut that is not there."""

from __future__ import annotations

import pytest

from outsize.errors import PlanError
from outsize.plan.stage_cuts import check_cuts

LEGAL = [f"model.layers.{index}" for index in range(1, 33)] + ["lm_head"]


@pytest.mark.parametrize(
    "cuts", [[], ["model.layers.1"], ["model.layers.9", "model.layers.10", "lm_head"], LEGAL]
)
def test_legal_cuts_in_order_pass(cuts: list[str]) -> None:
    """Order is the model's, not the alphabet's."""
    check_cuts(cuts, LEGAL)


@pytest.mark.parametrize(
    ("cut", "near"),
    [
        ("model.layers.40", "model.layers.29, model.layers.30, model.layers.31 or model.layers.32."),
        ("model.layers.0", "model.layers.1, model.layers.2, model.layers.3 or model.layers.4."),
        ("lm_heda", "lm_head."),
        ("7", "model.layers.1, model.layers.2, model.layers.3 or model.layers.4."),
    ],
)
def test_an_unknown_cut_is_answered_with_legal_ones_nearby(cut: str, near: str) -> None:
    """Nearest numbers first, then similar names, else the first ones."""
    with pytest.raises(PlanError) as caught:
        check_cuts(["model.layers.3", cut], LEGAL)
    assert caught.value.what == f"The model cannot be cut at {cut!r}."
    assert caught.value.attempt == f"a stage that begins at {near}"


def test_cuts_out_of_order_are_answered_with_their_order() -> None:
    """The message names the pair, and gives the list that would pass."""
    with pytest.raises(PlanError, match=r"'model.layers.10' comes after 'model.layers.9'") as caught:
        check_cuts(["model.layers.10", "model.layers.9", "lm_head"], LEGAL)
    assert caught.value.attempt == "model.layers.9, model.layers.10, lm_head."


def test_a_cut_twice_is_refused() -> None:
    """Two stages cannot begin at one place: one would be empty."""
    with pytest.raises(PlanError, match="'lm_head' is there twice"):
        check_cuts(["lm_head", "lm_head"], LEGAL)


def test_a_model_of_one_block_has_no_cuts() -> None:
    """The message says so instead of naming none."""
    with pytest.raises(PlanError, match=r"one block[\s\S]*one stage"):
        check_cuts(["head"], [])
