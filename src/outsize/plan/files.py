"""Plans as versioned JSON files: checked field by field when read, never unpickled."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outsize.errors import PlanError
from outsize.plan.plan import Plan

__all__ = ["FORMAT_VERSION", "load_plan", "plan_from_json", "plan_to_json", "save_plan"]

FORMAT_VERSION = 1


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain JSON values, with ``format_version``."""
    return {"format_version": FORMAT_VERSION, **asdict(plan)}


def plan_from_json(values: Any, *, source: str = "the plan") -> Plan:
    """Return the plan that JSON values describe.

    Raises:
        PlanError: another format version, or a field is missing, unknown or of the wrong type.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import

    if not isinstance(values, dict) or "format_version" not in values:
        raise PlanError(f"{source} is not a plan.", why="it has no format_version")
    version = values["format_version"]
    if version != FORMAT_VERSION:
        raise PlanError(
            f"{source} has format version {version!r}; this version of outsize reads {FORMAT_VERSION}.",
            attempt="plan again with this version",
        )
    fields = {name: value for name, value in values.items() if name != "format_version"}
    unknown = set(fields) - set(Plan.__dataclass_fields__)
    if unknown:
        raise PlanError(f"{source} has unknown fields.", why=", ".join(sorted(unknown)))
    try:
        return TypeAdapter(Plan).validate_python(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise PlanError(f"{source} is not right.", why=f"{place}: {fault['msg']}") from None


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan to ``path`` (replacing a file there at once, never half-written)."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(plan_to_json(plan), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def load_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        PlanError: no such file, not JSON, or not a plan of this format (see `plan_from_json`).
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"The plan {path} cannot be read.", why=str(error.strerror)) from None
    except ValueError as error:
        raise PlanError(f"The plan {path} is not JSON.", why=str(error)) from None
    return plan_from_json(values, source=f"The plan {path}")
