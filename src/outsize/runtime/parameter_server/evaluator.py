"""The evaluator beside the job: reads checkpoints only, always the newest, and never joins the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outsize.errors import LaunchError, TrainingError
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.parameter_server.checkpoint import load_whole, read_info

__all__ = ["evaluate_checkpoints"]


def evaluate_checkpoints(
    parent: Path,
    evaluate: Callable[[dict[str, torch.Tensor]], Any],
    *,
    last_step: int,
    poll_s: float = 5.0,
    timeout_s: float = 3600.0,
) -> Iterator[tuple[int, Any]]:
    """Yield ``(step, evaluate(values))`` for each checkpoint that is newest when its turn comes.

    ``values`` are all parameters and buffers by full name. Ends after the checkpoint of ``last_step`` or a
    later one. A checkpoint deleted while it is read is passed over.

    Raises:
        TrainingError: nothing new appeared in ``timeout_s``.
    """
    seen, waiting_since = -1, time.monotonic()
    while seen < last_step:
        found = _load_newer(parent, seen)
        if found is not None:
            seen, values = found
            yield seen, evaluate(values)
            waiting_since = time.monotonic()
        elif time.monotonic() - waiting_since > timeout_s:
            raise TrainingError(
                f"no new checkpoint below {parent} in {timeout_s:g} s", why=f"the last was of step {seen}"
            )
        else:
            time.sleep(poll_s)


def _load_newer(parent: Path, seen: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    try:
        folder = find_checkpoint(parent)
        step = read_info(folder).step
        return None if step <= seen else (step, load_whole(folder))
    except (LaunchError, OSError):
        return None  # there is none yet, or it was deleted while it was read: the next one is newer
