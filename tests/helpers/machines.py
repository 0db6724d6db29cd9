"""Two "machines" on this one: network namespaces with own addresses, joined by a cable (a veth pair)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Machine", "two_machines"]

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Machine:
    """A network namespace, with the one interface that leads out of it and its address there."""

    namespace: str
    interface: str
    address: str

    def enter(self) -> None:
        """Let this thread, and those it starts from here on, see the machine's network alone."""
        with Path("/run/netns", self.namespace).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def two_machines(*, rate: str | None = None) -> Iterator[tuple[Machine, Machine]]:
    """Join two machines for a while, by a cable of ``rate`` each way, such as "16mbit".

    The test is skipped, with the reason, where this cannot be done.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None or (rate is not None and shutil.which("tc") is None):
        pytest.skip("network namespaces need ip and tc (iproute2)")
    number = os.getpid()
    first, second = (Machine(f"outsize{number}-{at}", f"veth{number}-{at}", f"10.77.0.{at}") for at in (1, 2))
    try:
        _run(f"ip netns add {first.namespace}", or_skip=True)
        _run(f"ip netns add {second.namespace}")
        _run(
            f"ip link add {first.interface} netns {first.namespace} type veth "
            f"peer name {second.interface} netns {second.namespace}",
            or_skip=True,
        )
        for machine in (first, second):
            _run(f"ip -n {machine.namespace} address add {machine.address}/24 dev {machine.interface}")
            for interface in ("lo", machine.interface):
                _run(f"ip -n {machine.namespace} link set {interface} up")
            if rate is not None:
                limit = f"root tbf rate {rate} burst 16kb latency 1s"
                _run(f"tc -n {machine.namespace} qdisc add dev {machine.interface} {limit}", or_skip=True)
        yield first, second
    finally:
        for machine in (first, second):
            subprocess.run(["ip", "netns", "delete", machine.namespace], check=False, capture_output=True)


def _run(command: str, *, or_skip: bool = False) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode and or_skip:
        pytest.skip(f"not possible here: {command}: {done.stderr.strip()}")
    assert done.returncode == 0, f"{command}: {done.stderr}"
