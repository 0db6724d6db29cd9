"""The cluster argument in all its forms."""

import pytest

from outsize.cluster.argument import parse_cluster
from outsize.errors import ClusterError
from outsize.units import GIB


def test_emulated_devices_take_their_limit_and_share_cores() -> None:
    """4xcpu:1GiB is one machine of four 1 GiB devices on the given cores."""
    cluster = parse_cluster("4xcpu:1GiB", num_cores=2)
    assert cluster.num_devices == 4
    assert {device.memory_bytes for device in cluster.devices} == {GIB}
    assert all(device.is_emulated for device in cluster.devices)
    assert cluster.shared_cores == 2


def test_machines_times_devices() -> None:
    """8x8xH100 is eight machines of eight, joined by a network."""
    cluster = parse_cluster("8x8xH100")
    assert [len(machine.devices) for machine in cluster.machines] == [8] * 8
    assert cluster.network is not None


def test_many_devices_fill_usual_machines() -> None:
    """16384xH100 is 2048 machines of 8."""
    cluster = parse_cluster("16384xH100")
    assert (len(cluster.machines), cluster.num_devices) == (2048, 16384)


def test_a_device_may_be_known_by_memory_alone() -> None:
    """2x24GiB is one machine with two 24 GiB devices."""
    cluster = parse_cluster("2x24GiB")
    assert [device.memory_bytes for device in cluster.devices] == [24 * GIB] * 2
    assert cluster.network is None


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("0xcpu:1GiB", "zero devices"),
        ("0x8xH100", "zero devices"),
        ("8xH10", "H100"),
        ("2xcpu:many", "amount of memory"),
        ("2xcpu:0GiB", "no memory"),
        ("-2xH100", "negative"),
        ("4x", "names no device"),
        ("missing.toml", "cannot be read"),
        ("100xH100", "machines of 8"),
        ("2x2xcpu:1GiB", "4xcpu:1GiB"),
    ],
)
def test_a_bad_argument_says_what_is_wrong(argument: str, part: str) -> None:
    """Every mistake is one ClusterError that names it."""
    with pytest.raises(ClusterError, match=part):
        parse_cluster(argument)
