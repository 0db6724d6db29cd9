"""Schedules as JSON files, so that a user can write one; whatever is read passes the validator first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from outsize.errors import PlanError
from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_validation import validate_schedule
from outsize.plan.schedules import make_schedule

__all__ = ["FORMAT_VERSION", "find_schedule", "load_schedule", "save_schedule", "schedule_from_json"]

FORMAT_VERSION = 1
_FIELDS = ("name", "num_microbatches", "stage_to_rank", "actions")
_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")


def find_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, num_virtual_stages: int | None = None
) -> Schedule:
    """Return the schedule of this name, or the one in the file if ``name`` ends with ``.json``.

    A file says itself how many stages there are and where, any number on each rank.

    Raises:
        PlanError: as `make_schedule` and `load_schedule`, or the file's schedule is for other numbers.
    """
    if not name.endswith(".json"):
        return make_schedule(
            name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_virtual_stages=num_virtual_stages,
        )
    schedule = load_schedule(Path(name))
    for what, has, wanted in (
        ("ranks", schedule.num_ranks, num_ranks),
        ("micro-batches", schedule.num_microbatches, num_microbatches),
    ):
        if has != wanted:
            raise PlanError(
                f"The schedule {name} does not belong to this plan.",
                why=f"it is for {has} {what}, the plan has {wanted}.",
                attempt=f"a plan with {has} {what}, or another schedule.",
            )
    return schedule


def save_schedule(schedule: Schedule, path: Path) -> None:
    """Write a schedule, one line a rank, actions as ``2F3`` (forward of stage 2, micro-batch 3)."""
    head = {
        "format_version": FORMAT_VERSION,
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "stage_to_rank": schedule.stage_to_rank,
    }
    fields = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
    rows = [f"  {json.dumps([str(action) for action in actions])}" for actions in schedule.actions]
    fields.append(' "actions": [\n' + ",\n".join(rows) + "\n ]")
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")


def load_schedule(path: Path) -> Schedule:
    """Read a schedule and check that it can run.

    Raises:
        PlanError: no such file, not JSON, a field that is not right, or a schedule that cannot run.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"The schedule {path} cannot be read.", why=str(error.strerror)) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"The schedule {path} is not JSON.", why=str(error)) from None
    schedule = schedule_from_json(values, source=f"The schedule {path}")
    validate_schedule(schedule)
    return schedule


def schedule_from_json(values: Any, *, source: str = "the schedule") -> Schedule:
    """Return the schedule that JSON values describe, not yet validated.

    Raises:
        PlanError: another format version, or a field is missing, unknown or of the wrong type.
    """
    if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
        raise PlanError(f"{source} is not a schedule.", why=f"its format_version is not {FORMAT_VERSION}.")
    for field in sorted(set(values) - {*_FIELDS, "format_version"}):
        raise _wrong(source, field, f"no such field; there are {', '.join(_FIELDS)}")
    for field in _FIELDS:
        if field not in values:
            raise _wrong(source, field, "it is missing")
    name, num_microbatches, stage_to_rank, rows = (values[field] for field in _FIELDS)
    if not isinstance(name, str):
        raise _wrong(source, "name", "a text is wanted")
    if not _is_whole(num_microbatches):
        raise _wrong(source, "num_microbatches", "a whole number is wanted")
    if not isinstance(stage_to_rank, list) or not all(_is_whole(rank) for rank in stage_to_rank):
        raise _wrong(source, "stage_to_rank", "a list of ranks, one a stage, is wanted")
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise _wrong(source, "actions", "a list of lists, one a rank, is wanted")
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stage_to_rank=tuple(stage_to_rank),
        actions=tuple(
            tuple(_parse(text, source, f"actions[{rank}][{index}]") for index, text in enumerate(row))
            for rank, row in enumerate(rows)
        ),
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse(text: object, source: str, place: str) -> Action:
    found = _ACTION.fullmatch(text) if isinstance(text, str) and len(text) < 40 else None
    if found is None:
        raise _wrong(source, place, f"{text!r} is not an action; 2F3 would be the forward (F, or I, W, B)")
    stage, kind, microbatch = found.groups()
    return Action(int(stage), ActionKind(kind), int(microbatch))


def _wrong(source: str, field: str, why: str) -> PlanError:
    return PlanError(f"{source} is not right.", why=f"{field}: {why}.")
