"""When a server applies what workers push: asynchronous, bounded staleness, synchronous, with backups."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.errors import PlanError

__all__ = ["Tickets", "UpdatePolicy"]


@dataclass(frozen=True)
class UpdatePolicy:
    """Two numbers say it all.

    An update is the sum of ``pushes_per_update`` pushes and raises the version by one. A push is accepted if
    its update comes at most ``staleness_bound`` versions after the one that its worker read.

    ============================== ================= =================
    mode                           pushes_per_update staleness_bound
    ============================== ================= =================
    asynchronous                   1                 None
    bounded staleness              1 (or W)          tau
    synchronous, W workers         W                 0
    synchronous, B of them backups W - B             0
    ============================== ================= =================
    """

    pushes_per_update: int = 1
    staleness_bound: int | None = None

    def __post_init__(self) -> None:
        if self.pushes_per_update < 1 or (self.staleness_bound or 0) < 0:
            raise PlanError(f"{self} is not a policy", why="at least one push an update, staleness from 0")

    @classmethod
    def asynchronous(cls) -> UpdatePolicy:
        """Apply every push on arrival."""
        return cls()

    @classmethod
    def bounded_staleness(cls, bound: int, *, pushes_per_update: int = 1) -> UpdatePolicy:
        """Refuse a push that would be applied more than ``bound`` versions after what its worker read."""
        return cls(pushes_per_update, bound)

    @classmethod
    def synchronous(cls, num_workers: int, *, num_backup_workers: int = 0) -> UpdatePolicy:
        """Sum the first ``num_workers - num_backup_workers`` pushes of every version; drop the late ones."""
        return cls(num_workers - num_backup_workers, 0)


class Tickets:
    """Numbers accepted pushes; ticket ``n`` belongs to update ``n // pushes_per_update``.

    A ticket whose holder died before its push arrived is given to the next that asks.
    """

    def __init__(self, policy: UpdatePolicy, first_update: int = 0) -> None:
        self._policy = policy
        self._next = first_update * policy.pushes_per_update
        self._returned: list[int] = []

    def claim(self, version_read: int) -> int | None:
        """Return the ticket of a push, or None if it would be applied too late."""
        ticket = min(self._returned, default=self._next)
        bound = self._policy.staleness_bound
        if bound is not None and ticket // self._policy.pushes_per_update - version_read > bound:
            return None
        if self._returned:
            self._returned.remove(ticket)
        else:
            self._next += 1
        return ticket

    def give_back(self, ticket: int) -> None:
        """Let another push have a ticket."""
        self._returned.append(ticket)

    def next_update(self) -> int:
        """Return the update that the next ticket belongs to."""
        return min(self._returned, default=self._next) // self._policy.pushes_per_update

    def is_open(self, update: int) -> bool:
        """Whether that update, or an earlier one, still lacks a push that nobody has claimed."""
        return self.next_update() <= update
