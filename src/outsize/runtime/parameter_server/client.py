"""A worker's connection to all servers: pull parameters, push gradients, each in one exchange a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from outsize.errors import TrainingError
from outsize.runtime.parameter_server.dense_parameters import DenseParameters
from outsize.runtime.parameter_server.failures import raise_failure
from outsize.runtime.parameter_server.membership import Membership, wait_for
from outsize.runtime.parameter_server.protocol import DROPPED, WITH_DENSE, Kind
from outsize.runtime.parameter_server.row_routing import RowRouting
from outsize.runtime.parameter_server.session import Message, connect
from outsize.runtime.parameter_server.settings import SETTINGS_KEY, Settings

__all__ = ["Pulled", "PushOutcome", "ServerClient"]

_EMPTY = torch.empty(0, dtype=torch.uint8)
_ANSWER_S = 60.0
"""How much longer a server may take to say that a version did not come."""


class PushOutcome(Enum):
    """What became of a push."""

    ACCEPTED = "accepted"
    STALE = "stale"  # refused: pull again and compute again
    REPEATED = "repeated"  # its push id was applied before


@dataclass(frozen=True)
class Pulled:
    """Dense parameters by name, valid until the next pull, and the rows asked for, by table."""

    parameters: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]


class ServerClient:
    """Speaks with every server. Not for use by several threads at once.

    ``gradients`` holds a tensor for each dense variable; a gradient written there travels without a copy.
    """

    def __init__(self, membership: Membership, own_name: str, *, timeout_s: float = 300.0) -> None:
        """Connect, waiting for servers that start late.

        Raises:
            LaunchError: the servers did not start in time.
            ServerLostError: one started and does not answer.
        """
        text = wait_for(membership.client(), SETTINGS_KEY, timeout_s)
        self.settings = Settings.from_json(json.loads(text))
        self.layout = self.settings.layout
        timeout_s = max(timeout_s, self.settings.version_wait_s + _ANSWER_S)
        self._sessions = [
            connect(membership, f"server/{server}", own_name, timeout_s=timeout_s)
            for server in range(self.layout.num_servers)
        ]
        self._parameters, self._gradients = DenseParameters(self.layout), DenseParameters(self.layout)
        self.gradients = self._gradients.tensors
        self.versions = [0] * self.layout.num_servers
        self._minimum_version = 0
        self._was_dropped = False

    @property
    def num_bytes(self) -> int:
        """The memory of parameters and gradients here."""
        return self._parameters.num_bytes + self._gradients.num_bytes

    @property
    def _servers_must_agree(self) -> bool:
        return self.settings.policy.staleness_bound is not None and self.layout.num_servers > 1

    def pull(
        self,
        rows: Mapping[str, torch.Tensor] | None = None,
        *,
        dense: bool = True,
        minimum_version: int | None = None,
    ) -> Pulled:
        """Return the parameters, and the rows of tables that ``rows`` names by their indices.

        Waits where the policy wants the pushes of others first, or for ``minimum_version`` where it is given.

        Raises:
            ServerLostError: a server died.
            TrainingError: the version waited for did not come, or a row does not exist.
        """
        routing = RowRouting(self.layout, rows or {})
        least = self._minimum_version if minimum_version is None else minimum_version
        minimum = [least] * len(self._sessions)
        if self._servers_must_agree and self._was_dropped:
            minimum[1:] = [0] * (len(minimum) - 1)  # only server 0 knows whether the update is open again
        answers = [torch.empty(0, dtype=torch.uint8)] * len(self._sessions)
        behind: Sequence[int] = range(len(self._sessions))
        while behind:
            answers = self._pull_from(behind, minimum, dense, routing, answers)
            minimum = [max(self.versions)] * len(minimum)
            exact = self._servers_must_agree and self.settings.policy.staleness_bound == 0
            behind = _behind(self.versions) if exact else []
        if dense:
            self._parameters.gather()
        return Pulled(self._parameters.tensors, routing.assemble(answers))

    def push(
        self,
        gradients: Mapping[str, torch.Tensor] | None = None,
        rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        push_id: int = -1,
    ) -> PushOutcome:
        """Send gradients computed from the last pull: dense ones by name, rows as (indices, gradients).

        A dense variable that is not named gets a gradient of zero; without any, none moves. A push with an id
        is applied at most once, however often and by whomever it is sent.

        Raises:
            ServerLostError: a server died.
            TrainingError: a gradient has the wrong shape, or a row does not exist.
        """
        named = rows or {}
        indices = {name: one for name, (one, _) in named.items()}
        routing = RowRouting(self.layout, indices, {name: values for name, (_, values) in named.items()})
        if gradients is not None:
            self._gradients.fill(gradients)
        buffers = [
            (self._gradients.buffers[server] if gradients is not None else _EMPTY, routing.message(server))
            for server in range(len(self._sessions))
        ]
        return (
            self._push_claimed(buffers, push_id)
            if self._servers_must_agree
            else self._push_all(buffers, push_id)
        )

    def pull_more_rows(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return rows for the step whose parameters were pulled before: its push counts from that version."""
        versions = list(self.versions)
        pulled = self.pull(rows, dense=False, minimum_version=0).rows
        self.versions = versions
        return pulled

    def claim(self, push_id: int) -> Message:
        """Ask server 0 whether a push from the last pull counts; where servers must agree, ``push`` does."""
        return _checked(self._sessions[0].ask(Message(Kind.CLAIM, [push_id, min(self.versions)])))

    def read_rows(self, name: str, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return rows of a table by indices or by a slice, also one with a negative step."""
        if isinstance(rows, slice):
            rows = torch.tensor(range(*rows.indices(self.layout.variable(name).num_rows)), dtype=torch.int64)
        return self.pull({name: rows}, dense=False).rows[name]

    def close(self) -> None:
        """End all sessions."""
        for session in self._sessions:
            session.close()

    def _pull_from(
        self,
        servers: Sequence[int],
        minimum: Sequence[int],
        dense: bool,
        routing: RowRouting,
        answers: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        flags = (WITH_DENSE if dense else 0) | (DROPPED if self._was_dropped else 0)
        sends = [
            self._sessions[server].begin(
                Message(Kind.PULL, [minimum[server], flags], buffers=(routing.message(server),))
            )
            for server in servers
        ]
        updated = list(answers)
        for server, send in zip(servers, sends, strict=True):
            self._sessions[server].finish(send)
            answer = _checked(self._sessions[server].receive(self._parameters.buffers[server]))
            self.versions[server] = answer.value(0)
            updated[server] = answer.buffers[1]
        return updated

    def _push_all(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]], push_id: int) -> PushOutcome:
        """Push to every server, each of which decides by itself."""
        everyone = range(len(self._sessions))
        return self._note(self._exchange(everyone, buffers, push_id, self.versions, ticket=-1))

    def _push_claimed(
        self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]], push_id: int
    ) -> PushOutcome:
        """Ask server 0 whether the push counts; send it there last, so that it never has one others lack."""
        claim, version_read = self.claim(push_id), min(self.versions)
        if claim.kind != Kind.DONE:
            return self._note([claim])
        ticket, versions = claim.value(0), [version_read] * len(buffers)
        self._exchange(range(1, len(buffers)), buffers, push_id, versions, ticket)
        return self._note(self._exchange([0], buffers, push_id, versions, ticket))

    def _exchange(
        self,
        servers: Sequence[int],
        buffers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        push_id: int,
        versions: Sequence[int],
        ticket: int,
    ) -> list[Message]:
        sends = [
            self._sessions[server].begin(
                Message(Kind.PUSH, [push_id, versions[server], ticket], buffers=buffers[server])
            )
            for server in servers
        ]
        answers = []
        for server, send in zip(servers, sends, strict=True):
            self._sessions[server].finish(send)
            answers.append(_checked(self._sessions[server].receive()))
        return answers

    def _note(self, answers: Sequence[Message]) -> PushOutcome:
        """Remember from which version the next pull must be, and return the outcome."""
        bound = self.settings.policy.staleness_bound
        kinds = {answer.kind for answer in answers}
        self._was_dropped = Kind.STALE in kinds
        if self._was_dropped:
            self._minimum_version = answers[0].value(0)
            return PushOutcome.STALE
        if Kind.DONE not in kinds:
            return PushOutcome.REPEATED
        if bound is not None:
            self._minimum_version = max(0, answers[0].value(0) + 1 - bound)
        return PushOutcome.ACCEPTED


def _behind(versions: Sequence[int]) -> list[int]:
    """Return the servers whose version is not the newest."""
    return [server for server, version in enumerate(versions) if version < max(versions)]


def _checked(answer: Message) -> Message:
    if answer.kind == Kind.FAILED:
        raise_failure(answer)
        raise TrainingError("a parameter server refused a request", why=str(answer.data))
    return answer
