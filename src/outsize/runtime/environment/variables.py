"""Reading numbers and JSON out of environment variables, with errors that name the variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import DEFAULT_MASTER_PORT, parse_port

__all__ = ["read_index", "read_json_object", "read_number", "read_port"]


def read_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the non-negative number in a variable, or the default where it is unset or empty.

    Raises:
        LaunchError: it is unset and has no default, or is not such a number.
    """
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise LaunchError(f"{name} is {text!r}", why="a number is needed", attempt=f"set {name} to a number")
    return int(text)


def read_index(environ: Mapping[str, str], name: str, count: int, default: int | None = None) -> int:
    """Return the number in a variable, checked to lie in ``range(count)``.

    Raises:
        LaunchError: it is no number, or too large.
    """
    index = read_number(environ, name, default)
    if index >= count:
        raise LaunchError(f"{name} is {index}", why=f"it must be below {count}, the number there are")
    return index


def read_port(environ: Mapping[str, str], name: str, default: int = DEFAULT_MASTER_PORT) -> int:
    """Return the port in a variable, or the default.

    Raises:
        LaunchError: it is not a port.
    """
    text = environ.get(name, "").strip()
    return parse_port(text, name) if text else default


def read_json_object(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the JSON object in a variable; unset or empty is ``{}``.

    Raises:
        LaunchError: it is not JSON, or not an object.
    """
    text = environ.get(name, "").strip() or "{}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise LaunchError(f"{name} is not JSON", why=str(error), attempt=f"correct or unset {name}") from None
    if not isinstance(value, dict):
        raise LaunchError(f"{name} is a JSON {type(value).__name__}", why="an object is needed")
    return value
