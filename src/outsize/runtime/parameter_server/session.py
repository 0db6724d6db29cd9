"""A session: one fresh process group of two, so that peers come and go without a new world."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from outsize.errors import LaunchError
from outsize.runtime.parameter_server.lost import CoordinatorLostError, lost
from outsize.runtime.parameter_server.membership import Membership, wait_for

__all__ = ["Listener", "Message", "Session", "connect"]

HANDSHAKE_TIMEOUT_S = 20.0
"""How long the other side may take to join a session; a dead one is noticed after this long.

The store looks up the names of its peers, which costs seconds where the name server does not answer.
"""

_FOREVER_S = 365 * 24 * 3600.0
_HEADER_VALUES = 4
_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Message:
    """A kind, up to four numbers, JSON data, and up to two large buffers (uint8), which are never copied.

    ::

        header int64[8]: kind | 4 values | bytes of text | bytes of first buffer | bytes of second buffer
    """

    kind: int
    values: Sequence[int] = ()
    data: Any = None
    buffers: Sequence[torch.Tensor] = ()

    def value(self, position: int) -> int:
        """Return one of the numbers."""
        return self.values[position]


@dataclass
class Session:
    """One side of a connection. Every failure of the transport is an error that names the peer.

    ``timeout_s`` bounds each wait, so a peer that is frozen, not dead, is noticed too.
    """

    group: Any
    rank: int
    peer: str
    timeout_s: float
    incarnation: int = 0
    _scratch: list[torch.Tensor] = field(default_factory=lambda: [_EMPTY, _EMPTY])

    def begin(self, message: Message) -> list[Any]:
        """Start to send, and return what ``finish`` waits for."""
        text = b"" if message.data is None else json.dumps(message.data).encode()
        buffers = [*message.buffers, _EMPTY, _EMPTY][:2]
        values = [*message.values, 0, 0, 0, 0][:_HEADER_VALUES]
        sizes = [len(text), *(buffer.numel() for buffer in buffers)]
        header = torch.tensor([message.kind, *values, *sizes], dtype=torch.int64)
        text_tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _EMPTY
        parts = [header, *(part for part in (text_tensor, *buffers) if part.numel())]
        return [(self._call(self._group().send, [part], 1 - self.rank, 0), part) for part in parts]

    def finish(self, sends: list[Any]) -> None:
        """Wait until everything is sent."""
        for work, _part in sends:
            self._call(work.wait, timedelta(seconds=self.timeout_s))

    def send(self, message: Message) -> None:
        """Send a message."""
        self.finish(self.begin(message))

    def receive(self, *into: torch.Tensor) -> Message:
        """Return the next message; its buffers lie in ``into``, else in memory reused by the next call."""
        header = torch.empty(1 + _HEADER_VALUES + 3, dtype=torch.int64)
        self._receive_into(header)
        kind, *numbers = header.tolist()
        values, sizes = numbers[:_HEADER_VALUES], numbers[_HEADER_VALUES:]
        text = torch.empty(sizes[0], dtype=torch.uint8)
        self._receive_into(text)
        buffers = [self._buffer(position, size, into) for position, size in enumerate(sizes[1:])]
        for buffer in buffers:
            self._receive_into(buffer)
        data = json.loads(text.numpy().tobytes()) if sizes[0] else None
        return Message(kind, values, data, buffers)

    def ask(self, message: Message, *into: torch.Tensor) -> Message:
        """Send a message and return the answer."""
        self.send(message)
        return self.receive(*into)

    def close(self) -> None:
        """End the session, which the peer notices at once. No other thread may be waiting in it.

        (Nothing wakes a waiting one: gloo's groups ignore ``abort`` between two peers.)
        """
        self.group = None

    def _buffer(self, position: int, size: int, into: Sequence[torch.Tensor]) -> torch.Tensor:
        if position < len(into) and into[position].numel() == size:
            return into[position]
        if self._scratch[position].numel() < size:
            self._scratch[position] = torch.empty(size, dtype=torch.uint8)
        return self._scratch[position][:size]

    def _receive_into(self, buffer: torch.Tensor) -> None:
        if buffer.numel():
            work = self._call(self._group().recv, [buffer], 1 - self.rank, 0)
            self._call(work.wait, timedelta(seconds=self.timeout_s))

    def _group(self) -> Any:
        if self.group is None:
            raise lost(self.peer, "the session was closed")
        return self.group

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise lost(self.peer, str(error).splitlines()[0]) from None


class Listener:
    """Accepts sessions under a name (``server/0``, ``coordinator``), each handled in a thread of its own."""

    def __init__(self, membership: Membership, name: str, handle: Callable[[Session, int], None]) -> None:
        self._membership, self._name, self._handle = membership, name, handle
        self._store = membership.client()
        self._prefix = f"{name}/{self._store.add(f'{name}/incarnation', 1)}"
        self._num_accepted = 0
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        """Accept until ``stop``.

        Raises:
            CoordinatorLostError: the store is gone.
        """
        self._store.set(f"{self._prefix}/ready", "")
        while True:
            request = wait_for(self._store, f"{self._prefix}/request/{self._num_accepted + 1}", _FOREVER_S)
            self._num_accepted += 1
            if request == "stop":
                return
            arguments = (self._num_accepted, request)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=self._accept, args=arguments, daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Let ``run`` return; open sessions stay until their peers leave."""
        store = self._membership.client()
        store.set(f"{self._prefix}/request/{store.add(f'{self._prefix}/requests', 1)}", "stop")

    def join(self, timeout_s: float) -> None:
        """Wait for the threads of open sessions to end, at most so long in all."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, number: int, peer: str) -> None:
        try:
            store = self._membership.client(HANDSHAKE_TIMEOUT_S)
            key = f"{self._prefix}/session/{number}"
            session = _join(PrefixStore(key, store), self._membership.host, 0, peer, _FOREVER_S)
        except (RuntimeError, LaunchError):
            return  # the peer or the job died while it joined: nobody is waiting for an answer
        self._handle(session, int(peer.rpartition("/")[2]))


def connect(
    membership: Membership,
    name: str,
    own_name: str,
    *,
    timeout_s: float = 300.0,
    start_timeout_s: float = 180.0,
    minimum_incarnation: int = 1,
) -> Session:
    """Return a session with the process of that name, waiting for one that starts late.

    ``timeout_s`` bounds every later call; ``minimum_incarnation`` waits for the successor of a lost process.

    Raises:
        LaunchError: nobody of that name started in time.
        PeerLostError: it has started and does not answer.
    """
    store = membership.client(start_timeout_s)
    wait_for(store, f"{name}/{minimum_incarnation}/ready", start_timeout_s)
    try:
        incarnation = store.add(f"{name}/incarnation", 0)
        prefix = f"{name}/{incarnation}"
        wait_for(store, f"{prefix}/ready", start_timeout_s)
        number = store.add(f"{prefix}/requests", 1)
        store.set(f"{prefix}/request/{number}", own_name)
    except dist.DistNetworkError as error:
        raise CoordinatorLostError("coordinator", str(error)) from None
    try:
        store.set_timeout(timedelta(seconds=HANDSHAKE_TIMEOUT_S))
        own = PrefixStore(f"{prefix}/session/{number}", store)
        session = _join(own, membership.host, 1, name, timeout_s)
    except RuntimeError as error:
        raise lost(name, str(error).splitlines()[0]) from None
    session.incarnation = incarnation
    return session


def _join(store: PrefixStore, host: str, rank: int, peer: str, timeout_s: float) -> Session:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=HANDSHAKE_TIMEOUT_S)
    return Session(dist.ProcessGroupGloo(store, rank, 2, options), rank, peer, timeout_s)
