"""A worker: runs the steps the coordinator asks for, with the servers' parameters at hand."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outsize.errors import OutsizeError
from outsize.runtime.parameter_server.client import Pulled, PushOutcome, ServerClient
from outsize.runtime.parameter_server.failures import failure
from outsize.runtime.parameter_server.lost import CoordinatorLostError, ServerLostError
from outsize.runtime.parameter_server.membership import Membership
from outsize.runtime.parameter_server.protocol import Kind
from outsize.runtime.parameter_server.session import Message, connect

__all__ = ["Gradients", "StepContext", "StepFunction", "Worker"]


@dataclass(frozen=True)
class Gradients:
    """What a model gives back: dense gradients by name, those of tables as (indices, gradients)."""

    dense: Mapping[str, torch.Tensor] | None = None
    rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None


@dataclass
class StepContext:
    """What a step may use. ``memory`` (for data sets, say) starts empty in a replacement of the worker."""

    servers: ServerClient
    worker: int
    push_id: int
    memory: dict[str, Any] = field(default_factory=dict)

    def update(
        self,
        compute: Callable[[Pulled], Gradients],
        rows: Mapping[str, torch.Tensor] | None = None,
        *,
        dense: bool = True,
        minimum_version: int | None = None,
    ) -> PushOutcome:
        """Pull, compute and push, again for as long as the push is refused as stale.

        ``minimum_version`` waits for that version, whatever this worker pushed last.

        The step's push id makes this one update at most, also when the step is repeated elsewhere; use it
        once in a step. A pull and its gradients are all the servers need to know about a model.
        """
        outcome = PushOutcome.STALE
        while outcome is PushOutcome.STALE:
            gradients = compute(self.servers.pull(rows, dense=dense, minimum_version=minimum_version))
            outcome = self.servers.push(gradients.dense, gradients.rows, push_id=self.push_id)
        return outcome


StepFunction = Callable[[StepContext, Any], Any]
"""A step gets its context and the scheduled argument, and returns plain data."""


class Worker:
    """Serves the coordinator under an index. A replacement of a lost worker takes over its index."""

    def __init__(self, membership: Membership, index: int, steps: Mapping[str, StepFunction]) -> None:
        self._membership, self._index, self._steps = membership, index, steps
        self._servers: ServerClient | None = None
        self._epoch = 0
        self._memory: dict[str, Any] = {}

    def run(self) -> None:
        """Run steps until the coordinator says stop.

        Raises:
            CoordinatorLostError: the coordinator died.
        """
        session = connect(self._membership, "coordinator", self._name, timeout_s=1e8)
        try:
            while (message := session.receive()).kind != Kind.STOP:
                session.send(self._run_step(message))
        finally:
            self._forget_servers()

    @property
    def _name(self) -> str:
        return f"worker/{self._index}"

    def _run_step(self, message: Message) -> Message:
        push_id, epoch = message.values[:2]
        name, argument = message.data
        try:
            step = self._steps[name]
        except KeyError:
            return Message(Kind.FAILED, data=f"unknown step {name!r}; there are {sorted(self._steps)}")
        try:
            context = StepContext(self._connected(epoch), self._index, push_id, self._memory)
            return Message(Kind.DONE, data=step(context, argument))
        except ServerLostError as error:
            self._forget_servers()
            return Message(Kind.SERVER_LOST, data=[error.name, error.reason])
        except CoordinatorLostError:
            raise
        except OutsizeError as error:
            return failure(error)
        except Exception:  # a step is anybody's code: whatever it raises is the coordinator's to judge
            return Message(Kind.FAILED, data=traceback.format_exc())

    def _connected(self, epoch: int) -> ServerClient:
        if self._servers is not None and self._epoch != epoch:
            self._forget_servers()
        if self._servers is None:
            self._servers, self._epoch = ServerClient(self._membership, self._name), epoch
        return self._servers

    def _forget_servers(self) -> None:
        if self._servers is not None:
            self._servers.close()
        self._servers = None
