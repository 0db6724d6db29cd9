"""The coordinator's connection to the servers: first values, checkpoints, statistics, and their deaths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outsize.errors import TrainingError
from outsize.runtime.parameter_server.applied_pushes import AppliedPushes
from outsize.runtime.parameter_server.checkpoint import (
    CheckpointInfo,
    partial_folder,
    publish_checkpoint,
    save_constants,
)
from outsize.runtime.parameter_server.failures import raise_failure
from outsize.runtime.parameter_server.layout import Shard
from outsize.runtime.parameter_server.lost import PeerLostError, ServerLostError
from outsize.runtime.parameter_server.membership import Membership
from outsize.runtime.parameter_server.protocol import Kind
from outsize.runtime.parameter_server.session import Message, Session, connect
from outsize.runtime.parameter_server.settings import Settings

__all__ = ["OWN_NAME", "STOP_TIMEOUT_S", "ServerControl"]

OWN_NAME = "coordinator/0"
STOP_TIMEOUT_S = 5.0
"""How long an orderly end may take before it is left to the operating system."""


class ServerControl:
    """One session for requests and one that only waits for the end, for each server."""

    def __init__(
        self, membership: Membership, settings: Settings, on_lost: Callable[[ServerLostError], None]
    ) -> None:
        self._membership, self._settings, self._on_lost = membership, settings, on_lost
        self._sessions: dict[int, Session] = {}
        self._incarnations: dict[int, int] = {}
        self._lock = threading.Lock()
        self._watchers: list[threading.Thread] = []

    def connect(self) -> None:
        """Connect to all servers that have no session, waiting for successors of lost ones.

        Raises:
            LaunchError: a server did not start in time.
            ServerLostError: one started and does not answer.
        """
        for server in range(self._settings.layout.num_servers):
            if server in self._sessions:
                continue
            name, minimum = f"server/{server}", self._incarnations.get(server, 0) + 1
            session = connect(self._membership, name, OWN_NAME, minimum_incarnation=minimum)
            watch = connect(self._membership, name, OWN_NAME, timeout_s=1e8, minimum_incarnation=minimum)
            self._sessions[server], self._incarnations[server] = session, session.incarnation
            self._watchers.append(threading.Thread(target=self._watch, args=(server, watch), daemon=True))
            self._watchers[-1].start()

    def configure(self) -> None:
        """Give every server the settings; it starts from zeros."""
        for server in self._everyone():
            self._ask(server, Message(Kind.CONFIGURE, data=self._settings.to_json()))

    def set_values(self, initial: Callable[[Shard], torch.Tensor]) -> None:
        """Ask for every shard's first values, one shard at a time, and send them."""
        for server in self._everyone():
            for position, shard in enumerate(self._shards(server)):
                values = initial(shard).detach().to(shard.variable.dtype).contiguous()
                if values.shape != shard.shape:
                    raise TrainingError(
                        f"first values of shape {tuple(values.shape)} for {shard.variable.name}",
                        why=f"rows {shard.first_row} to {shard.first_row + shard.num_rows} are {shard.shape}",
                    )
                buffer = values.view(-1).view(torch.uint8)
                self._ask(server, Message(Kind.SET_SHARD, [position], buffers=(buffer,)))

    def read_variable(self, name: str) -> torch.Tensor:
        """Return a whole variable as it is now."""
        variable = self._settings.layout.variable(name)
        whole = torch.empty(variable.shape, dtype=variable.dtype)
        for shard in self._settings.layout.shards_of(name):
            position = self._shards(shard.server).index(shard)
            answer = self._ask(shard.server, Message(Kind.GET_SHARD, [position]))
            value = answer.buffers[0].view(variable.dtype).view(shard.shape)
            (whole[shard.first_row : shard.first_row + shard.num_rows] if variable.shape else whole).copy_(
                value
            )
        return whole

    def save(self, parent: Path, constants: Mapping[str, torch.Tensor]) -> Path:
        """Write a checkpoint below ``parent`` and return its folder. The caller keeps workers still.

        Raises:
            TrainingError: the servers are not at one version.
        """
        version = int(self.statistics()[0]["version"])
        step = version * self._settings.steps_per_update
        folder = partial_folder(parent, step)
        answers = [self._ask(server, Message(Kind.SAVE, data=str(folder))) for server in self._everyone()]
        versions = [answer.value(0) for answer in answers]
        if set(versions) != {version}:
            raise TrainingError(
                f"the servers are at versions {versions}", why="an update has reached only some of them"
            )
        watermark, *newer = answers[0].data
        save_constants(folder, constants)
        return publish_checkpoint(folder, CheckpointInfo(step, AppliedPushes(watermark, newer)))

    def load(self, folder: Path) -> int:
        """Load a checkpoint into all servers and return its version."""
        request = Message(Kind.LOAD, data=str(folder))
        answers = [self._ask(server, request) for server in self._everyone()]
        return answers[0].value(0)

    def statistics(self) -> list[dict[str, Any]]:
        """Return every server's version, staleness histogram and counts of refused and repeated pushes."""
        found = [self._ask(server, Message(Kind.STATISTICS)).data for server in self._everyone()]
        return [
            one | {"staleness": {int(age): count for age, count in one["staleness"].items()}} for one in found
        ]

    def answers(self, server: int) -> bool:
        """Whether a server still answers."""
        try:
            self._ask(server, Message(Kind.STATISTICS))
        except PeerLostError:
            return False
        return True

    def stop(self) -> None:
        """Stop all servers that are there."""
        for server in list(self._sessions):
            try:
                self._ask(server, Message(Kind.STOP))
            except PeerLostError:
                continue  # it is gone already, which is what was wanted
        self._sessions.clear()
        for watcher in self._watchers:
            watcher.join(STOP_TIMEOUT_S)

    def _everyone(self) -> range:
        return range(self._settings.layout.num_servers)

    def _shards(self, server: int) -> list[Shard]:
        return [shard for shard in self._settings.layout.shards if shard.server == server]

    def _ask(self, server: int, message: Message) -> Message:
        with self._lock:
            session = self._sessions.get(server)
            if session is None:
                raise ServerLostError(f"server/{server}")
            try:
                answer = session.ask(message)
            except PeerLostError:
                self._sessions.pop(server, None)
                raise
        if answer.kind == Kind.FAILED:
            raise_failure(answer)
            raise TrainingError(f"server {server} refused a request", why=str(answer.data))
        return answer

    def _watch(self, server: int, session: Session) -> None:
        try:
            session.ask(Message(Kind.WATCH))
        except ServerLostError as error:
            self._sessions.pop(server, None)
            self._on_lost(error)
