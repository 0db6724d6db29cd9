"""Plans as versioned JSON files: checked field by field when read, never unpickled."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outsize.errors import PlanError
from outsize.plan.plan import Plan

__all__ = ["FORMAT_VERSION", "check_writable", "load_plan", "plan_from_json", "plan_to_json", "save_plan"]

FORMAT_VERSION = 1
_WRITTEN_BY = "a file that `outsize plan --save` wrote"


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
        raise PlanError(f"{source} is not a plan.", why="it has no format_version", attempt=_WRITTEN_BY)
    version = values["format_version"]
    if version != FORMAT_VERSION:
        raise PlanError(
            f"{source} has format version {version!r}; this version of outsize reads {FORMAT_VERSION}.",
            attempt="plan again with this version",
        )
    fields = {name: value for name, value in values.items() if name != "format_version"}
    unknown = set(fields) - set(Plan.__dataclass_fields__)
    if unknown:
        raise PlanError(
            f"{source} has unknown fields.", why=", ".join(sorted(unknown)), attempt="without them"
        )
    try:
        return TypeAdapter(Plan).validate_python(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise PlanError(
            f"{source} is not right.", why=f"{place}: {fault['msg']}", attempt=_WRITTEN_BY
        ) from None


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan to ``path`` (replacing a file there at once, never half-written).

    Raises:
        PlanError: the file cannot be written.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(json.dumps(plan_to_json(plan), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _not_writable(path, str(error.strerror)) from None


def check_writable(*paths: Path | None) -> None:
    """Refuse places for files, before the work that they are for: a folder, or none where it would be.

    Raises:
        PlanError: with the reason.
    """
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise _not_writable(path, "it is a folder")
        if not path.parent.is_dir():
            raise _not_writable(path, f"there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _not_writable(path, "it may not be written there")


def _not_writable(path: Path, why: str) -> PlanError:
    return PlanError(f"{path} cannot be written.", why=why, attempt="another place for the file")


def load_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        PlanError: no such file, not JSON, or not a plan of this format (see `plan_from_json`).
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"The plan {path} cannot be read.", why=str(error.strerror), attempt=_WRITTEN_BY
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"The plan {path} is not JSON.", why=str(error), attempt=_WRITTEN_BY) from None
    return plan_from_json(values, source=f"The plan {path}")
