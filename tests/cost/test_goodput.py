"""Checkpoint intervals and goodput against the exact optimum and a simulation."""

import math
import random

import pytest

from outsize.cost.goodput import best_checkpoint_interval_s, estimate_goodput, goodput_share
from outsize.errors import OutsizeError


@pytest.mark.parametrize("checkpoint_s", [5.0, 60.0, 600.0])
@pytest.mark.parametrize("mean_s", [3600.0, 86400.0])
def test_the_interval_is_within_a_permille_of_the_best(checkpoint_s, mean_s) -> None:
    """No interval on a fine grid has a goodput more than 0.1% above that of Daly's estimate."""
    figures = {"checkpoint_s": checkpoint_s, "restart_s": 120.0, "mean_time_between_failures_s": mean_s}
    mine = goodput_share(best_checkpoint_interval_s(checkpoint_s, mean_s), **figures)
    best = max(goodput_share(mean_s * step / 1000, **figures) for step in range(1, 3000))
    assert mine >= best * 0.999


def test_young_is_the_limit_of_cheap_checkpoints() -> None:
    """For δ far below M the interval tends to sqrt(2 δ M): 1 s and 10^8 s give 14,142 s."""
    assert best_checkpoint_interval_s(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)


def test_goodput_is_what_a_simulation_of_failures_gives() -> None:
    """20,000 intervals with exponential failures take the expected time within 2%."""
    interval, checkpoint, restart, mean = 1000.0, 60.0, 120.0, 4000.0
    draw = random.Random(0)
    elapsed = 0.0
    for _ in range(20_000):
        while True:
            needed, failure = interval + checkpoint, draw.expovariate(1 / mean)
            if failure >= needed:
                elapsed += needed
                break
            elapsed += failure
            while (again := draw.expovariate(1 / mean)) < restart:
                elapsed += again
            elapsed += restart
    share = goodput_share(
        interval, checkpoint_s=checkpoint, restart_s=restart, mean_time_between_failures_s=mean
    )
    assert 20_000 * interval / elapsed == pytest.approx(share, rel=0.02)


def test_a_hundred_thousand_devices_fail_often() -> None:
    """Llama 3's 16,384 devices failed every 2.8 hours (arXiv 2407.21783); 100,000 every 28 minutes."""
    hours = 2.8 * 16384
    goodput = estimate_goodput(100_000, device_mtbf_hours=hours, checkpoint_s=30, restart_s=300)
    assert goodput.mean_time_between_failures_s == pytest.approx(27.5 * 60, rel=0.01)
    assert 0.5 < goodput.share < 0.9


def test_senseless_figures_are_refused() -> None:
    """Zero hours between failures is one message."""
    with pytest.raises(OutsizeError, match="above zero"):
        estimate_goodput(8, device_mtbf_hours=0, checkpoint_s=1, restart_s=1)
