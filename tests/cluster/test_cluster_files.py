"""Cluster files: what they may say, and how mistakes are reported."""

import pytest

from outsize.cluster.catalog import device_names, find_device, find_link, link_names
from outsize.cluster.files import load_cluster
from outsize.errors import ClusterError


def _load(tmp_path, text: str):
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def test_machines_may_differ_and_figures_may_be_replaced(tmp_path) -> None:
    """Counts, memory, rates and links of a file arrive in the cluster."""
    cluster = _load(
        tmp_path,
        """
        network = { bandwidth = 1.1, latency_us = 40 }
        [[machines]]
        count = 2
        devices = [{ kind = "RTX4090", count = 2, memory = "20GiB", tflops = { bf16 = 100 } }]
        link = "pcie3"
        [[machines]]
        devices = [{ kind = "L40S" }]
        """,
    )
    assert [len(machine.devices) for machine in cluster.machines] == [2, 2, 1]
    assert cluster.devices[0].memory_bytes == 20 * 2**30
    assert cluster.devices[0].rate("bf16") == 100e12
    assert cluster.machines[0].link.kind == "pcie3"
    assert cluster.network.bandwidth_bytes_per_s == 1.1e9


@pytest.mark.parametrize(("cards", "share"), [(4, 0.5), (8, 1.0), (16, 1.0)])
def test_devices_share_a_machines_network_cards(tmp_path, cards, share) -> None:
    """Eight devices behind four cards of 24 GB/s get 12 each; more cards than devices help none."""
    cluster = _load(
        tmp_path,
        f"""
        network = {{ bandwidth = 24, latency_us = 12 }}
        network_cards = {cards}
        pod_machines = 2
        oversubscription = 4
        [[machines]]
        count = 4
        devices = [{{ kind = "A100", count = 8 }}]
        """,
    )
    assert cluster.network.bandwidth_bytes_per_s == pytest.approx(share * 24e9)
    inside, beyond = cluster.span(8, 2, world_size=32), cluster.span(8, 4)
    assert inside.across.bandwidth_bytes_per_s == pytest.approx(share * 24e9)
    assert beyond.across.bandwidth_bytes_per_s == pytest.approx(share * 6e9)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("machines = []", "machines"),
        ("[[machines]]\ndevices = [{ kind = 'H100', count = 0 }]", "count"),
        ("[[machines]]\ndevices = [{ kind = 'H100', colour = 'red' }]", "colour"),
        ("[[machines]]\ndevices = [{ kind = 'H1000' }]", "H100"),
        ("[[machines]]\ndevices = [{ kind = 'H100', memory = '9' }]", "amount of memory"),
        ("network = 'ethernet_11'\n[[machines]]\ncount = 2\ndevices = [{ kind = 'H100' }]", "ethernet_10"),
        ("machines = [", "not TOML"),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path, text, part) -> None:
    """One ClusterError each."""
    with pytest.raises(ClusterError, match=part):
        _load(tmp_path, text)


def test_every_catalog_entry_is_whole() -> None:
    """Each device has a rate, a source, and links that exist."""
    for name in device_names():
        entry = find_device(name)
        assert entry.device.rate("fp32") > 0
        assert entry.source
    assert all(find_link(name).bandwidth_bytes_per_s > 0 for name in link_names())
