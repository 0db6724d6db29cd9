"""Addresses of hosts and ports, IPv6 included."""

from __future__ import annotations

import pytest

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import is_loopback, split_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("n1:2222", "n1", 2222),
        ("n1", "n1", 7),
        ("[fd00::1]:2222", "fd00::1", 2222),
        ("[fd00::1]", "fd00::1", 7),
        ("fd00::1", "fd00::1", 7),
        (" job-worker-0.ns.svc:2222 ", "job-worker-0.ns.svc", 2222),
    ],
)
def test_hosts_and_ports_come_apart(text: str, host: str, port: int) -> None:
    """An IPv6 address loses its brackets; without brackets it has no port."""
    assert split_address(text, default_port=7) == (host, port)


@pytest.mark.parametrize("text", ["", ":2222", "n1:http", "n1:0", "n1:65536"])
def test_a_bad_address_is_refused(text: str) -> None:
    """No host or an impossible port is an error that repeats the text."""
    with pytest.raises(LaunchError):
        split_address(text)


def test_only_this_machine_is_loopback() -> None:
    """Loopback in both families, and its name."""
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "localhost"]))
    assert not any(map(is_loopback, ["10.0.0.1", "fd00::1", "n1"]))
