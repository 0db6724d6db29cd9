"""Reads a Hugging Face ``config.json``; no torch, no transformers, nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outsize.errors import ModelError

__all__ = ["read_config_file"]


def read_config_file(location: str) -> tuple[Path, dict[str, Any]]:
    """Return the path of the configuration at ``location`` (a file or its folder), and what it holds.

    Raises:
        ModelError: there is no such file, or it is no JSON object.
    """
    path = Path(location)
    path = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"there is no file {path}",
            why="nothing is downloaded: a directory on this machine is taken, or its config.json",
            attempt="the path of one; save_pretrained of transformers writes it",
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} is no readable JSON", why=str(error), attempt="the config.json that came with the model"
        ) from error
    if not isinstance(settings, dict):
        raise ModelError(
            f"{path} holds no JSON object",
            why=f"it holds a {type(settings).__name__}",
            attempt="the config.json that came with the model",
        )
    return path, settings
