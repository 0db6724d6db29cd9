"""The evaluator beside the job: reads checkpoints only, always the newest, and never joins the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outsize.errors import TrainingError
from outsize.runtime.parameter_server.checkpoint import latest_checkpoint, load_variables, read_info

__all__ = ["evaluate_checkpoints"]


def evaluate_checkpoints(
    parent: Path,
    evaluate: Callable[[dict[str, torch.Tensor]], Any],
    *,
    last_version: int,
    poll_s: float = 5.0,
    timeout_s: float = 3600.0,
) -> Iterator[tuple[int, Any]]:
    """Yield ``(version, evaluate(parameters))`` for each checkpoint that is newest when its turn comes.

    Ends after the checkpoint of ``last_version`` or a later one. A checkpoint deleted while it is read is
    passed over.

    Raises:
        TrainingError: nothing new appeared in ``timeout_s``.
    """
    seen, waiting_since = -1, time.monotonic()
    while seen < last_version:
        found = _load_newer(parent, seen)
        if found is not None:
            seen, parameters = found
            yield seen, evaluate(parameters)
            waiting_since = time.monotonic()
        elif time.monotonic() - waiting_since > timeout_s:
            raise TrainingError(
                f"no new checkpoint below {parent} in {timeout_s:g} s", why=f"the last was of version {seen}"
            )
        else:
            time.sleep(poll_s)


def _load_newer(parent: Path, seen: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    folder = latest_checkpoint(parent)
    if folder is None:
        return None
    try:
        version = read_info(folder).version
        if version <= seen:
            return None
        return version, {name: values["value"] for name, values in load_variables(folder).items()}
    except TrainingError:
        return None  # deleted or replaced while it was read: the next one is newer
