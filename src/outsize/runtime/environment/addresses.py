"""Network addresses as launchers write them: ``host``, ``host:port``, ``[ipv6]:port`` and bare IPv6."""

from __future__ import annotations

import ipaddress

from outsize.errors import LaunchError

__all__ = ["DEFAULT_MASTER_PORT", "is_loopback", "parse_port", "split_address"]

DEFAULT_MASTER_PORT = 29500
"""What torchrun uses where nothing else is said."""


def split_address(address: str, default_port: int = DEFAULT_MASTER_PORT) -> tuple[str, int]:
    """Return host (an IPv6 one without brackets) and port of an address.

    Raises:
        LaunchError: there is no host, or the port is not one.
    """
    text = address.strip()
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port_text = rest.removeprefix(":")
    elif text.count(":") > 1:  # an IPv6 address without brackets has no room for a port
        host, port_text = text, ""
    else:
        host, _, port_text = text.partition(":")
    if not host:
        raise LaunchError(f"{address!r} is not an address", attempt="write host:port, or [ipv6]:port")
    return host, parse_port(port_text, address) if port_text else default_port


def parse_port(text: str, where: str) -> int:
    """Return the port number in ``text``; ``where`` names its origin in the error.

    Raises:
        LaunchError: the text is not a number between 1 and 65535.
    """
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return int(text)
    raise LaunchError(f"{text!r} in {where} is not a port", why="a port is a number from 1 to 65535")


def is_loopback(host: str) -> bool:
    """Whether a host can only be this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
