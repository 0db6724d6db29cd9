"""Known models by name, from ``presets.toml``: planning them needs neither their weights nor torch."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from outsize.errors import ModelError
from outsize.model.transformer_profile import TransformerConfig

__all__ = ["find_preset", "is_preset", "preset_names"]


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("outsize.model").joinpath("presets.toml").read_text(encoding="utf-8"))


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return list(_tables())


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def is_preset(name: str) -> bool:
    """Whether a preset has this name, in any case and with or without dashes."""
    return _plain(name) in map(_plain, preset_names())


def find_preset(name: str) -> TransformerConfig:
    """Return the sizes of the preset called ``name``.

    Raises:
        ModelError: no such preset; the message holds the nearest names.
    """
    by_plain = {_plain(each): each for each in preset_names()}
    key = by_plain.get(_plain(name))
    if key is None:
        near = [by_plain[each] for each in get_close_matches(_plain(name), by_plain, n=3, cutoff=0.4)]
        raise ModelError(f"No preset is called {name!r}.", attempt=", ".join(near or preset_names()))
    sizes = {field: value for field, value in _tables()[key].items() if field != "source"}
    return TransformerConfig(name=key, **sizes)
