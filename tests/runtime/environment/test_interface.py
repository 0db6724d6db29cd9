"""Which interface leads to the other machines."""

from __future__ import annotations

from collections import namedtuple

import psutil
import pytest

from outsize.runtime.environment import interface

_Entry = namedtuple("_Entry", "address")
_INTERFACES = {"lo": [_Entry("127.0.0.1")], "eth7": [_Entry("10.0.0.5"), _Entry("fe80::1%eth7")]}


@pytest.mark.parametrize(
    ("leads_to_master", "is_alone", "expected"),
    [
        ("10.0.0.5", False, "eth7"),
        ("127.0.1.1", False, "eth7"),
        ("127.0.0.1", True, "lo"),
        (None, True, None),
    ],
)
def test_a_master_name_that_is_loopback_at_home_does_not_hide_the_machine(
    leads_to_master: str | None, is_alone: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian lets a machine's name stand for 127.0.1.1 on itself; other machines need the way out."""
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: _INTERFACES)
    ways = {"master": leads_to_master, interface._ELSEWHERE: "10.0.0.5"}
    monkeypatch.setattr(interface, "address_towards", ways.get)
    assert interface.interface_towards("master", is_alone=is_alone) == expected


def test_the_way_to_the_loopback_address_is_the_loopback_address() -> None:
    """A name that stands for nothing has no way to it, and that is no error."""
    assert interface.address_towards("127.0.0.1") == "127.0.0.1"
    assert interface.address_towards("no-such-host.invalid") is None
