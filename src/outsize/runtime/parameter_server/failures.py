"""Errors of one role on their way to another: an OutsizeError arrives as it was raised."""

from __future__ import annotations

import outsize.errors
from outsize.errors import OutsizeError
from outsize.runtime.parameter_server.protocol import Kind
from outsize.runtime.parameter_server.session import Message

__all__ = ["error_of", "failure", "raise_failure"]


def failure(error: OutsizeError) -> Message:
    """Return the message that carries an error."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    kind = next(name for name in kinds if name in outsize.errors.__all__)
    return Message(Kind.FAILED, data=[kind, error.what, error.why, error.attempt])


def error_of(answer: Message) -> OutsizeError | None:
    """Return the error that a FAILED message carries; None where it carries the text of some other error."""
    if not isinstance(answer.data, list):
        return None
    kind, what, why, attempt = answer.data
    error: OutsizeError = getattr(outsize.errors, kind)(what, why=why, attempt=attempt)
    return error


def raise_failure(answer: Message) -> None:
    """Raise the error that a FAILED message carries, if it carries one."""
    error = error_of(answer)
    if error is not None:
        raise error
