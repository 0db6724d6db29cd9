"""Error bands by the rung a model was recorded on."""

from __future__ import annotations

import pytest

from outsize.cost.error_bands import describe_rung, error_bands
from outsize.model.program import Rung


@pytest.mark.parametrize("rung", ["formulas", *map(str, Rung)])
def test_every_rung_has_bands_around_its_prediction(rung: str) -> None:
    """A band holds the prediction itself."""
    bands = error_bands(rung)
    assert bands.memory[0] < 1 < bands.memory[1]
    assert bands.step_time[0] < 1 < bands.step_time[1]


def test_lower_rungs_have_wider_bands() -> None:
    """The ladder goes down: fake tensors, real tensors, parameter counts."""
    fake, real, counts = (error_bands(str(rung)) for rung in Rung)
    for upper, lower in ((fake, real), (real, counts)):
        assert lower.memory[1] - lower.memory[0] > upper.memory[1] - upper.memory[0]
        assert lower.step_time[1] - lower.step_time[0] > upper.step_time[1] - upper.step_time[0]


def test_the_sentence_says_why_no_better_rung_was_reached() -> None:
    """A reader learns the source of the figures, the reason and the bands."""
    text = describe_rung("parameter_counts", "the forward failed")
    assert "parameter counts alone (the forward failed)" in text
    assert "0.3 to 8 times the memory" in text


def test_times_on_emulated_devices_are_said_to_be_rough() -> None:
    """They share the cores of one machine, and a process holds more than its tensors."""
    text = describe_rung("fake_tensors", is_emulated=True)
    assert "0.93 to 1.3 times the memory of tensors" in text
    assert "0.83 to 5 times the time" in text
