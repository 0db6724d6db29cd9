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
_HEADER_BYTES = 8 * (1 + _HEADER_VALUES + 3)
_FRAME_BYTES = 8192
_ALIGNMENT_BYTES = 64  # of what lies in a frame
_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Message:
    """A kind, up to four numbers, JSON data, and up to two buffers (uint8); large ones are never copied.

    A frame of fixed size travels first, with all that has room in it: every transfer of its own wakes threads
    on both sides, which takes longer than to send a few kilobytes. What has no room follows by itself.

    ::

        frame:  header | text | first buffer | second buffer
        header: kind | 4 values | bytes of text | bytes of first buffer | bytes of second buffer    (int64)
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
    _scratch: list[torch.Tensor] = field(default_factory=lambda: [_EMPTY] * 3)

    def begin(self, message: Message) -> list[Any]:
        """Start to send, and return what ``finish`` waits for."""
        text = b"" if message.data is None else json.dumps(message.data).encode()
        buffers = [*message.buffers, _EMPTY, _EMPTY][:2]
        values = [*message.values, 0, 0, 0, 0][:_HEADER_VALUES]
        text_tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _EMPTY
        parts = [text_tensor, *buffers]
        sizes = [part.numel() for part in parts]
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        frame[:_HEADER_BYTES] = torch.tensor([message.kind, *values, *sizes]).view(torch.uint8)
        alone = [frame]
        for part, place in zip(parts, _places(sizes), strict=True):
            if place is None:
                alone.append(part)
            else:
                frame[place] = part
        return [(self._call(self._group().send, [part], 1 - self.rank, 0), part) for part in alone]

    def finish(self, sends: list[Any]) -> None:
        """Wait until everything is sent."""
        for work, _part in sends:
            self._call(work.wait, timedelta(seconds=self.timeout_s))

    def send(self, message: Message) -> None:
        """Send a message."""
        self.finish(self.begin(message))

    def receive(self, *into: torch.Tensor) -> Message:
        """Return the next message; its buffers lie in ``into``, else in memory reused by the next call."""
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._receive_into(frame)
        kind, *numbers = frame[:_HEADER_BYTES].view(torch.int64).tolist()
        values, sizes = numbers[:_HEADER_VALUES], numbers[_HEADER_VALUES:]
        wanted: list[torch.Tensor | None] = [None, *into, None, None]
        text, *buffers = (
            self._part(frame, number, *each)
            for number, each in enumerate(zip(sizes, _places(sizes), wanted, strict=False))
        )
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

    def _part(
        self, frame: torch.Tensor, number: int, size: int, place: slice | None, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """Return text or a buffer: from the frame, or received now; in the memory ``wanted`` if it fits."""
        fits = wanted is not None and wanted.numel() == size
        if place is not None:
            return wanted.copy_(frame[place]) if wanted is not None and fits else frame[place]
        if wanted is None or not fits:
            if self._scratch[number].numel() < size:
                self._scratch[number] = torch.empty(size, dtype=torch.uint8)
            wanted = self._scratch[number][:size]
        self._receive_into(wanted)
        return wanted

    def _receive_into(self, buffer: torch.Tensor) -> None:
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


def _places(sizes: Sequence[int]) -> list[slice | None]:
    """Return where in the frame each part lies, or None for one that travels by itself."""
    places: list[slice | None] = []
    start = _HEADER_BYTES
    for size in sizes:
        has_room = start + size <= _FRAME_BYTES
        places.append(slice(start, start + size) if has_room else None)
        if has_room:
            start = -(-(start + size) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places


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
