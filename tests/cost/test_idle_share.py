"""Closed forms of idle time against the simulator of schedules."""

import pytest

from outsize.cost.idle_share import idle_share
from outsize.cost.layout import Layout
from outsize.plan.plan import Mesh
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate
from outsize.plan.schedules import make_schedule


def _simulated(name: str, stages_per_rank: int, weight: float, *, ends_together: bool) -> float:
    """Idle time over (p - 1) t, forward and input gradient taking equal parts of what weights leave."""
    ranks, microbatches = 8, 24
    schedule = make_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
    part = (1 - weight) / 2 / stages_per_rank
    times = StageTimes.split(part, part, weight / stages_per_rank)
    run = simulate(schedule, ScheduleTimes.uniform(ranks * stages_per_rank, times, 0.0))
    span = run.makespan_s if ends_together else run.longest_span_s
    return (span - microbatches) / (ranks - 1)


@pytest.mark.parametrize("weight", [0.15, 0.2034, 0.2722, 1 / 3])
@pytest.mark.parametrize("ends_together", [True, False])
@pytest.mark.parametrize(
    ("name", "stages_per_rank"), [("1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2), ("v_half", 2)]
)
def test_idle_shares_are_those_of_the_simulated_schedules(
    name: str, stages_per_rank: int, weight: float, ends_together: bool
) -> None:
    """0.2034 and 0.2722 are the shares of the 1.5B and 28.3B models of the Zero Bubble paper."""
    layout = Layout(Mesh(pp=8), 1, 24, schedule=name, num_virtual_stages=stages_per_rank)
    expected = _simulated(name, stages_per_rank, weight, ends_together=ends_together)
    assert idle_share(layout, weight, ends_together=ends_together) == pytest.approx(expected, abs=2e-3)
