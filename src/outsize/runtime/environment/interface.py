"""Which network interface leads to the other machines of a job."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import psutil

__all__ = ["address_towards", "interface_towards", "own_address"]

_ELSEWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737): the way there is the way out of this machine."""


def own_address() -> str:
    """Return the address under which other machines see this one; its host name where none is known."""
    return address_towards(_ELSEWHERE) or socket.gethostname()


def interface_towards(host: str, *, is_alone: bool) -> str | None:
    """Return the name of the interface that leads to ``host``, or None where the system does not say.

    A host name often stands for a loopback address on its own machine. With several machines in the job
    (``is_alone`` false) the others could not reach that, and the interface that leads outside is meant.
    """
    address = address_towards(host)
    if address is not None and not is_alone and ipaddress.ip_address(address).is_loopback:
        address = address_towards(_ELSEWHERE)
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def address_towards(host: str) -> str | None:
    """Return this machine's own address on the way to ``host``, or None without a way. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None
