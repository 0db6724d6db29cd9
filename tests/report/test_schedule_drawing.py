"""Drawings of a simulated run: each action stands once, where and as long as it runs."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from outsize.plan.schedule_simulation import ScheduleTimes, SimulatedRun, StageTimes, simulate
from outsize.plan.schedules import SCHEDULE_NAMES, make_schedule
from outsize.report.schedule_drawing import draw_as_rich_text, draw_as_svg, draw_as_text


def run_of(name: str, num_ranks: int = 2, num_microbatches: int = 4) -> SimulatedRun:
    """Simulate with F = I = W = 3 s and free transfers."""
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return simulate(schedule, ScheduleTimes.uniform(schedule.num_stages, StageTimes.split(3, 3, 3)))


def test_text_is_the_staircase_of_1f1b() -> None:
    """Two ranks, two micro-batches, a column a second: 27 columns and the summary."""
    assert draw_as_text(run_of("1f1b", num_microbatches=2), width=27).splitlines() == [
        "rank 0  F0─F1─······B0────···B1────",
        "rank 1  ···F0─B0────F1─B1────",
        "1f1b: 2 stages on 2 ranks, 2 micro-batches, 27.0 s, idle 33.3%, at most 2 in flight",
    ]


def test_stages_are_named_where_ranks_hold_several() -> None:
    """In a V an action without its stage would be ambiguous."""
    drawing = draw_as_text(run_of("zb_v"), width=200)
    assert "0F0" in drawing
    assert "3W0" in drawing


def test_a_narrow_terminal_keeps_the_kind_of_every_visible_action() -> None:
    """Where a label has no room the letter of its kind stays, and no row is wider than asked."""
    rows = draw_as_text(run_of("1f1b", 4, 8), width=40).splitlines()[:-1]
    assert all(len(row) <= len("rank 0  ") + 40 for row in rows)
    assert all("F" in row and "B" in row for row in rows)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_coloured_text_says_what_plain_text_says(name: str) -> None:
    """Colours add nothing that only colours tell."""
    run = run_of(name)
    coloured = draw_as_rich_text(run, width=60).plain.splitlines()
    assert [row.rstrip("·") for row in coloured] == draw_as_text(run, width=60).splitlines()


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_svg_has_every_action_once_to_scale(name: str) -> None:
    """The picture's boxes are the run's actions; widths are proportional to their times."""
    run = run_of(name)
    root = ElementTree.fromstring(draw_as_svg(run, width=1072))  # 1000 pixels of timeline
    boxes = {}
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        box = group.find("{http://www.w3.org/2000/svg}rect")
        assert box is not None
        boxes[group.attrib["data-action"]] = (float(box.attrib["x"]), float(box.attrib["width"]))
    timed = {str(timed.action): timed for actions in run.timeline for timed in actions}
    assert boxes.keys() == timed.keys()
    for action, (x, width) in boxes.items():
        scale = 1000 / run.makespan_s
        assert x == pytest.approx(64 + timed[action].start_s * scale, abs=0.01)
        assert width == pytest.approx((timed[action].end_s - timed[action].start_s) * scale, abs=0.01)


def test_svg_does_not_let_a_schedules_name_break_the_picture() -> None:
    """A user's schedule may be called anything."""
    run = run_of("1f1b")
    object.__setattr__(run.schedule, "name", '<b>"&</b>')
    assert '<b>"&</b>: 2 stages' in "".join(ElementTree.fromstring(draw_as_svg(run)).itertext())
