"""Errors for users: what happened, why, and what to try."""

from __future__ import annotations

__all__ = [
    "BatchError",
    "ClusterError",
    "DoesNotFitError",
    "LaunchError",
    "ModelError",
    "OutsizeError",
    "PlanError",
    "RecordingError",
    "TrainingError",
]


class OutsizeError(Exception):
    """A mistake or limit that a user can act on; the command line prints it without a traceback.

    ``what`` says what happened, ``why`` the reason with its numbers, ``attempt`` what to try next.
    """

    exit_code = 2

    def __init__(self, what: str, *, why: str = "", attempt: str = "") -> None:
        self.what, self.why, self.attempt = what, why, attempt
        parts = [what, why and f"Why: {why}", attempt and f"Try: {attempt}"]
        super().__init__("\n".join(part for part in parts if part))


class ModelError(OutsizeError):
    """The model argument cannot be found, imported or built."""


class RecordingError(OutsizeError):
    """The model's forward cannot be recorded as asked."""


class ClusterError(OutsizeError):
    """The cluster argument or file is not understood."""


class PlanError(OutsizeError):
    """No such plan is legal, or a plan does not belong to this model or cluster."""


class BatchError(OutsizeError):
    """A batch does not have the shape the plan needs."""


class DoesNotFitError(OutsizeError):
    """Nothing fits, or a device ran out of memory."""


class LaunchError(OutsizeError):
    """Worker processes could not be started, or one of them failed."""


class TrainingError(OutsizeError):
    """Training cannot go on, for example because a gradient is not finite."""
