"""A user's own schedule: what is written is read again, and whatever is wrong is refused by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outsize.errors import PlanError
from outsize.plan.schedule_files import find_schedule, load_schedule, save_schedule
from outsize.plan.schedules import SCHEDULE_NAMES, make_schedule


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_saved_schedule_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    """Writing and reading gives the same value for every schedule."""
    schedule = make_schedule(name, num_ranks=3, num_microbatches=6)
    save_schedule(schedule, tmp_path / "mine.json")
    assert load_schedule(tmp_path / "mine.json") == schedule


def document(**changes: Any) -> dict[str, Any]:
    """Return one rank, one micro-batch, as a user would write it."""
    fields = {
        "format_version": 1,
        "name": "mine",
        "num_microbatches": 1,
        "stage_to_rank": [0],
        "actions": [["0F0", "0B0"]],
    }
    return {key: value for key, value in {**fields, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is not 1"),
        ({"name": 5}, "name: a text"),
        ({"num_microbatches": "1"}, "num_microbatches: a whole number"),
        ({"num_microbatches": True}, "num_microbatches: a whole number"),
        ({"stage_to_rank": [0.5]}, "stage_to_rank: a list of ranks"),
        ({"actions": ["0F0 0B0"]}, "actions: a list of lists"),
        ({"actions": [["0F0", "0X0"]]}, r"actions\[0\]\[1\]: '0X0' is not an action"),
        ({"actions": [["0F0", 7]]}, r"actions\[0\]\[1\]: 7 is not an action"),
        ({"actions": [["0F0", "0B" + "9" * 5000]]}, r"actions\[0\]\[1\]"),
        ({"actions": None}, "actions: it is missing"),
        ({"speed": 11}, "speed: no such field"),
        ({"actions": [["0B0", "0F0"]]}, "0B0 can never run"),
        ({"actions": []}, "there are ranks 0 to -1"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Fields, single actions and the order as a whole: each fault is named where it stands."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document(**changes)))
    with pytest.raises(PlanError, match=message):
        load_schedule(path)


def test_files_that_are_missing_or_not_json_are_refused(tmp_path: Path) -> None:
    """No traceback for a path that is wrong or a file that is something else."""
    with pytest.raises(PlanError, match="cannot be read"):
        load_schedule(tmp_path / "nothing.json")
    (tmp_path / "text.json").write_text("0F0 0B0")
    with pytest.raises(PlanError, match="is not JSON"):
        load_schedule(tmp_path / "text.json")


def test_a_file_is_found_by_its_name_and_must_fit_the_plan(tmp_path: Path) -> None:
    """A name ending in .json is a file; its numbers of ranks and micro-batches must be the plan's."""
    path = str(tmp_path / "mine.json")
    schedule = make_schedule("zb_v", num_ranks=2, num_microbatches=4)
    save_schedule(schedule, Path(path))
    assert find_schedule(path, num_ranks=2, num_microbatches=4, num_virtual_stages=2) == schedule
    assert find_schedule("zb_v", num_ranks=2, num_microbatches=4) == schedule
    with pytest.raises(PlanError, match="it is for 4 micro-batches, the plan has 8"):
        find_schedule(path, num_ranks=2, num_microbatches=8)
    with pytest.raises(PlanError, match="it is for 2 ranks, the plan has 4"):
        find_schedule(path, num_ranks=4, num_microbatches=4)
