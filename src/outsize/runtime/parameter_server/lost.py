"""Errors of a cluster of roles: who was lost, and what to do about it."""

from __future__ import annotations

from outsize.errors import TrainingError

__all__ = [
    "CoordinatorLostError",
    "PeerLostError",
    "ServerLostError",
    "StepFailedError",
    "WorkerLostError",
    "lost",
]


class PeerLostError(TrainingError):
    """The connection to another process ended: it died, was stopped or cannot be reached."""

    attempt_text = "look at that process's log"

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(f"{name} is lost", why=why, attempt=self.attempt_text)
        self.name, self.reason = name, why

    def __reduce__(self) -> tuple[type[PeerLostError], tuple[str, str]]:
        return type(self), (self.name, self.reason)

    @property
    def index(self) -> int:
        """The index of the lost process among those of its role."""
        return int(self.name.rpartition("/")[2])


class ServerLostError(PeerLostError):
    """A parameter server is lost, and with it the newest values of its shards."""

    attempt_text = "start the server again and restore the last checkpoint"


class WorkerLostError(PeerLostError):
    """A worker is lost; the others go on."""

    attempt_text = "start a replacement with the same index; it joins by itself"


class CoordinatorLostError(PeerLostError):
    """The coordinator is lost, and with it the job."""

    attempt_text = "start the job again; it goes on from the last checkpoint"

    @property
    def index(self) -> int:
        """There is one coordinator."""
        return 0


class StepFailedError(TrainingError):
    """A step raised an error on its worker; ``text`` is the error as the worker saw it."""

    def __init__(self, step: str, worker: int, text: str) -> None:
        super().__init__(f"step {step!r} failed on worker {worker}", why=text)
        self.step, self.worker, self.text = step, worker, text

    def __reduce__(self) -> tuple[type[StepFailedError], tuple[str, int, str]]:
        return type(self), (self.step, self.worker, self.text)


_BY_ROLE = {"server": ServerLostError, "worker": WorkerLostError, "coordinator": CoordinatorLostError}


def lost(name: str, why: str) -> PeerLostError:
    """Return the error for a lost process called ``server/0``, ``worker/1`` or ``coordinator``."""
    return _BY_ROLE.get(name.partition("/")[0], PeerLostError)(name, why)
