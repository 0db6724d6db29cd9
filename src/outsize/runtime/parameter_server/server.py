"""A parameter server: answers sessions of workers and of the coordinator until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from outsize.errors import OutsizeError, TrainingError
from outsize.runtime.parameter_server.checkpoint import load_shards, read_info, save_shards
from outsize.runtime.parameter_server.failures import failure
from outsize.runtime.parameter_server.lost import PeerLostError
from outsize.runtime.parameter_server.membership import Membership
from outsize.runtime.parameter_server.protocol import (
    DROPPED,
    WITH_DENSE,
    Kind,
    pack_values,
    unpack_rows,
    unpack_values,
)
from outsize.runtime.parameter_server.server_state import PushAnswer, ServerState
from outsize.runtime.parameter_server.session import Listener, Message, Session
from outsize.runtime.parameter_server.settings import Settings

__all__ = ["Server"]

STOP_TIMEOUT_S = 5.0
"""How long sessions may take to end in good order."""


class Server:
    """Holds shards and runs their optimizer. One thread a session; the state has a lock of its own."""

    def __init__(self, membership: Membership, index: int) -> None:
        self._index = index
        self._state: ServerState | None = None
        self._stopped = threading.Event()
        self._listener = Listener(membership, f"server/{index}", self._serve)

    def run(self) -> None:
        """Serve until the coordinator says stop.

        Raises:
            CoordinatorLostError: the coordinator died.
        """
        try:
            self._listener.run()
        finally:
            self._stopped.set()
        self._listener.join(STOP_TIMEOUT_S)

    def _serve(self, session: Session, _peer_index: int) -> None:
        held: set[int] = set()  # tickets claimed by this session whose push has not arrived
        try:
            while self._answer(session, session.receive(), held):
                pass
        except PeerLostError:
            session.close()  # a worker that goes costs only itself: its tickets return, the others go on
        finally:
            for ticket in held:
                self._ready().give_back(ticket)

    def _answer(self, session: Session, message: Message, held: set[int]) -> bool:
        """Handle one message; return whether the session goes on."""
        handlers: dict[int, Callable[[Session, Message, set[int]], None]] = {
            Kind.PULL: self._pull,
            Kind.PUSH: self._push,
            Kind.CLAIM: self._claim,
            Kind.CONFIGURE: self._configure,
            Kind.SET_SHARD: self._set_shard,
            Kind.GET_SHARD: self._get_shard,
            Kind.SAVE: self._save,
            Kind.LOAD: self._load,
            Kind.STATISTICS: self._statistics,
            Kind.WATCH: self._watch,
        }
        if message.kind == Kind.STOP:
            self._listener.stop()
            session.send(Message(Kind.DONE))
            return False
        try:
            handlers[message.kind](session, message, held)
        except PeerLostError:
            raise
        except OutsizeError as error:
            session.send(failure(error))
        except (RuntimeError, IndexError, OSError) as error:
            session.send(Message(Kind.FAILED, data=str(error)))
        return True

    def _ready(self) -> ServerState:
        if self._state is None:
            raise TrainingError(f"server {self._index} has no parameters yet")
        return self._state

    def _pull(self, session: Session, message: Message, _held: set[int]) -> None:
        state = self._ready()
        minimum, flags = message.value(0), message.value(1)
        rows, _ = (
            unpack_rows(state.storage.table_shards, message.buffers[0])
            if message.buffers[0].numel()
            else ([], None)
        )
        with state.condition:
            state.wait_for_version(minimum, was_dropped=bool(flags & DROPPED))
            version = state.version
            flat = state.storage.borrow() if flags & WITH_DENSE else torch.empty(0, dtype=torch.uint8)
            values = state.storage.read_rows(rows) if rows else []
        try:
            session.send(Message(Kind.DONE, [version], buffers=(flat, pack_values(values))))
        finally:
            if flags & WITH_DENSE:
                with state.condition:
                    state.storage.give_back(flat)

    def _claim(self, session: Session, message: Message, held: set[int]) -> None:
        answer = self._ready().claim(message.value(0), message.value(1))
        if answer.kind == Kind.DONE:
            held.add(answer.number)
        _reply(session, answer)

    def _push(self, session: Session, message: Message, held: set[int]) -> None:
        state = self._ready()
        push_id, version_read, ticket = message.values[:3]
        dense, tail = message.buffers
        shards = state.storage.table_shards
        updates = []
        if tail.numel():
            rows, values = unpack_rows(shards, tail)
            gradients = unpack_values(shards, [len(indices) for indices in rows], values)
            updates = list(zip(rows, gradients, strict=True))
        answer = state.push(push_id, version_read, ticket, dense if dense.numel() else None, updates)
        held.discard(ticket)
        _reply(session, answer)

    def _configure(self, session: Session, message: Message, _held: set[int]) -> None:
        self._state = ServerState(Settings.from_json(message.data), self._index)
        session.send(Message(Kind.DONE))

    def _set_shard(self, session: Session, message: Message, _held: set[int]) -> None:
        state = self._ready()
        shard = state.storage.shards[message.value(0)]
        values = message.buffers[0].view(shard.variable.dtype).view(shard.shape)
        with state.condition:
            state.storage.set_shard(shard, {"value": values})
        session.send(Message(Kind.DONE))

    def _get_shard(self, session: Session, message: Message, _held: set[int]) -> None:
        state = self._ready()
        with state.condition:
            value = state.storage.values_of(state.storage.shards[message.value(0)])["value"].clone()
        session.send(Message(Kind.DONE, buffers=(value.view(-1).view(torch.uint8),)))

    def _save(self, session: Session, message: Message, _held: set[int]) -> None:
        state = self._ready()
        with state.condition:
            save_shards(Path(message.data), self._index, state.storage)
            applied = [state.applied.watermark, *sorted(state.applied.newer)]
            version = state.version
        session.send(Message(Kind.DONE, [version], data=applied))

    def _load(self, session: Session, message: Message, _held: set[int]) -> None:
        state, folder = self._ready(), Path(message.data)
        with state.condition:
            step = load_shards(folder, state.storage)
            version = step // state.settings.steps_per_update
            state.restart_at(version, read_info(folder).applied)
        session.send(Message(Kind.DONE, [version]))

    def _watch(self, session: Session, _message: Message, _held: set[int]) -> None:
        self._stopped.wait()
        session.send(Message(Kind.DONE))

    def _statistics(self, session: Session, _message: Message, _held: set[int]) -> None:
        session.send(Message(Kind.DONE, data=self._ready().statistics()))


def _reply(session: Session, answer: PushAnswer) -> None:
    session.send(Message(answer.kind, [answer.number]))
