"""A server's state machine: versions, accepted pushes and updates, safe to use from many threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outsize.errors import TrainingError
from outsize.runtime.parameter_server.applied_pushes import AppliedPushes
from outsize.runtime.parameter_server.protocol import Kind, RowUpdate
from outsize.runtime.parameter_server.settings import Settings
from outsize.runtime.parameter_server.shard_storage import ShardStorage
from outsize.runtime.parameter_server.update_policy import Tickets

__all__ = ["PushAnswer", "ServerState"]


@dataclass(frozen=True)
class PushAnswer:
    """DONE, STALE or REPEATED, and a number: the push's update, the version needed, or the version."""

    kind: Kind
    number: int


@dataclass
class _PendingUpdate:
    """The sum of the pushes of one update that have arrived so far."""

    dense: torch.Tensor | None = None
    rows: list[list[RowUpdate]] = field(default_factory=list)
    push_ids: list[int] = field(default_factory=list)

    def summed_rows(self) -> list[RowUpdate]:
        """Return one update a table shard, with each row once."""
        pushes = [updates for updates in self.rows if updates]
        if len(pushes) <= 1:
            return pushes[0] if pushes else []
        return [_sum_of_rows(of_one_table) for of_one_table in zip(*pushes, strict=True)]


def _sum_of_rows(pushes: Sequence[RowUpdate]) -> RowUpdate:
    indices, inverse = torch.unique(torch.cat([rows for rows, _ in pushes]), return_inverse=True)
    gradients = torch.cat([gradient for _, gradient in pushes])
    total = gradients.new_zeros(len(indices), *gradients.shape[1:])
    return indices, total.index_add_(0, inverse, gradients)


class ServerState:
    """Values, version and bookkeeping of one server.

    Several servers must agree on which pushes make up an update once pushes can be refused. Then server 0
    decides (``claim``) and the others take its ticket; else every server numbers what arrives.
    """

    def __init__(self, settings: Settings, server: int) -> None:
        self.settings = settings
        self.storage = ShardStorage(settings.layout, server, settings.optimizer)
        self.condition = threading.Condition()
        self.restart_at(0, AppliedPushes())

    def restart_at(self, version: int, applied: AppliedPushes) -> None:
        """Forget everything pending and go on from a version."""
        self.version, self.applied = version, applied
        self.tickets = Tickets(self.settings.policy, version)
        self._arrived = AppliedPushes(version * self.settings.policy.pushes_per_update)
        self._pending: dict[int, _PendingUpdate] = {}
        self.staleness: Counter[int] = Counter()
        self.num_stale = self.num_repeated = 0

    def wait_for_version(self, minimum: int, *, was_dropped: bool = False) -> None:
        """Wait, with the condition held, until the version is reached.

        A worker whose push was refused may also go on when a place in the present update becomes free,
        because the one that had it died.

        Raises:
            TrainingError: the version did not come in time.
        """
        bound = self.settings.policy.staleness_bound or 0

        def may_go_on() -> bool:
            return self.version >= minimum or (was_dropped and self.tickets.is_open(self.version + bound))

        if not self.condition.wait_for(may_go_on, self.settings.version_wait_s):
            have = len(self._pending.get(self.version, _PendingUpdate()).push_ids)
            raise TrainingError(
                f"version {minimum} did not come in {self.settings.version_wait_s:g} s",
                why=f"update {self.version} has {have} of {self.settings.policy.pushes_per_update} pushes",
                attempt="start the missing worker again, or train with backup workers",
            )

    def claim(self, push_id: int, version_read: int) -> PushAnswer:
        """Decide about a push before it is sent; the answer's number is then its ticket."""
        with self.condition:
            if self._is_known(push_id):
                self.num_repeated += 1
                return PushAnswer(Kind.REPEATED, self.version)
            ticket = self.tickets.claim(version_read)
            return self._stale() if ticket is None else PushAnswer(Kind.DONE, ticket)

    def give_back(self, ticket: int) -> None:
        """Free the ticket of a worker that died before its push arrived."""
        with self.condition:
            self.tickets.give_back(ticket)
            self.condition.notify_all()

    def push(
        self,
        push_id: int,
        version_read: int,
        ticket: int,
        dense: torch.Tensor | None,
        rows: Sequence[RowUpdate],
    ) -> PushAnswer:
        """Take a push; ``ticket`` is -1 where this server decides by itself."""
        with self.condition:
            if (ticket >= 0 and ticket in self._arrived) or (ticket < 0 and self._is_known(push_id)):
                self.num_repeated += 1
                return PushAnswer(Kind.REPEATED, self.version)
            claimed = self.tickets.claim(version_read) if ticket < 0 else ticket
            if claimed is None:
                return self._stale()
            self._arrived.add(claimed)
            update = claimed // self.settings.policy.pushes_per_update
            self.staleness[update - version_read] += 1
            self._add(update, push_id, dense, rows)
            return PushAnswer(Kind.DONE, update)

    def statistics(self) -> dict[str, Any]:
        """Return version, histogram of staleness, and how many pushes were refused or repeated."""
        with self.condition:
            return {
                "version": self.version,
                "staleness": dict(sorted(self.staleness.items())),
                "num_stale": self.num_stale,
                "num_repeated": self.num_repeated,
            }

    def _is_known(self, push_id: int) -> bool:
        pending = (update.push_ids for update in self._pending.values())
        return push_id >= 0 and (push_id in self.applied or any(push_id in ids for ids in pending))

    def _stale(self) -> PushAnswer:
        self.num_stale += 1
        policy = self.settings.policy
        return PushAnswer(Kind.STALE, self.tickets.next_update() - (policy.staleness_bound or 0))

    def _add(self, number: int, push_id: int, dense: torch.Tensor | None, rows: Sequence[RowUpdate]) -> None:
        if self.settings.policy.pushes_per_update == 1 and number == self.version:
            self._apply(_PendingUpdate(dense, [list(rows)], [push_id]))
            return
        update = self._pending.setdefault(number, _PendingUpdate())
        update.push_ids.append(push_id)
        update.rows.append([(indices.clone(), gradient.clone()) for indices, gradient in rows])
        if dense is not None and update.dense is None:
            update.dense = dense.clone()
        elif dense is not None and update.dense is not None:
            self.storage.add_dense(update.dense, dense)
        while len(self._next_pending()) == self.settings.policy.pushes_per_update:
            self._apply(self._pending.pop(self.version))

    def _next_pending(self) -> list[int]:
        return self._pending[self.version].push_ids if self.version in self._pending else []

    def _apply(self, update: _PendingUpdate) -> None:
        self.storage.apply(update.dense, update.summed_rows())
        for push_id in update.push_ids:
            if push_id >= 0:
                self.applied.add(push_id)
        self.version += 1
        self.condition.notify_all()
