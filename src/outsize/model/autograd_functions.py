"""Custom autograd functions called between blocks: kept whole, or their backward would be lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from outsize.model.program import NodeKind
from outsize.model.recorder import Recorder

__all__ = ["autograd_functions_recorded"]


@contextmanager
def autograd_functions_recorded(recorder: Recorder) -> Iterator[None]:
    """Write a call of a ``torch.autograd.Function`` outside blocks as one node while inside.

    Its forward runs without gradients, so that the operators in it would be recorded as constants.
    """

    def apply(cls: Any, *args: Any) -> Any:
        call = super(_SingleLevelFunction, cls).apply
        # operators of libraries have such functions inside, and are recorded themselves
        if recorder.leaf is None and cls is CheckpointFunction:
            function, _, *inputs = args  # recomputation is up to the plan; what is computed is recorded
            return function(*inputs)
        if recorder.leaf is not None or cls.__module__.startswith("torch."):
            return call(*args)
        arguments = recorder.flatten_arguments(args, {})
        recorder.leaf = cls.__qualname__
        try:
            result = call(*args)
        finally:
            recorder.leaf = None
        recorder.add_call(NodeKind.OPERATOR, cls.apply, arguments, result)
        return result

    # the base class: Function.apply ends there, also where it was kept by another name before
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
