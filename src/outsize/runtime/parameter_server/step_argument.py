"""Arguments of scheduled steps: plain data, with one value for each worker where wanted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outsize.errors import TrainingError
from outsize.runtime.parameter_server.step_queue import StepFuture

__all__ = ["PerWorker", "argument_for", "check_argument"]


@dataclass(frozen=True)
class PerWorker:
    """Stands for ``values[i]`` when the step runs on worker ``i``; there is at least one."""

    values: Sequence[Any]


def check_argument(argument: Any) -> None:
    """Refuse what cannot be sent.

    Raises:
        TrainingError: the argument is no plain data, or holds the future of another step.
    """
    try:
        json.dumps(argument, default=_plain)
    except (TypeError, ValueError) as error:
        raise TrainingError(
            "the argument of a step is not plain data",
            why=str(error),
            attempt="send numbers, texts, lists and dicts; load tensors inside the step",
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, PerWorker):
        return list(value.values)
    if isinstance(value, StepFuture):
        raise TypeError("it holds the future of another step; fetch its result first")
    raise TypeError(f"it holds a {type(value).__name__}")


def argument_for(argument: Any, worker: int) -> Any:
    """Return the argument as one worker gets it; the values repeat where there are more workers."""
    if isinstance(argument, PerWorker):
        return argument.values[worker % len(argument.values)]
    if isinstance(argument, dict):
        return {key: argument_for(value, worker) for key, value in argument.items()}
    if isinstance(argument, list | tuple):
        return [argument_for(value, worker) for value in argument]
    return argument
