"""Clusters as TOML files: machines may differ, and every figure of the catalog may be replaced.

network = "ethernet_10"                 # a name, or { bandwidth = 1.1, latency_us = 40 } in GB/s a device
network_cards = 4                       # then the network's figures are those of one card, shared by devices
pod_machines = 128                      # beyond so many machines ...
oversubscription = 3                    # ... each device gets a third
[[machines]]
count = 2
devices = [{ count = 4, kind = "RTX4090" }, { count = 1, memory = "48GiB", kind = "L40S" }]
link = "pcie4"
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from outsize.cluster.catalog import find_device, find_link, with_memory
from outsize.cluster.device import Device
from outsize.cluster.link import Link
from outsize.cluster.topology import Cluster, Machine
from outsize.errors import ClusterError
from outsize.units import parse_bytes

__all__ = ["load_cluster"]


_EXAMPLE = 'tables [[machines]] with devices = [{ count = 8, kind = "H100" }]'


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _LinkFigures(_Strict):
    bandwidth: PositiveFloat  # GB/s for one device
    latency_us: float = Field(default=10.0, ge=0)
    kind: str = "given"


class _Devices(_Strict):
    kind: str
    count: PositiveInt = 1
    memory: str | None = None
    tflops: dict[str, PositiveFloat] | None = None
    bandwidth: PositiveFloat | None = None  # GB/s


class _MachineFigures(_Strict):
    devices: list[_Devices] = Field(min_length=1)
    count: PositiveInt = 1
    link: str | _LinkFigures | None = None
    failures_per_hour: float = Field(default=0.0, ge=0)


class _ClusterFigures(_Strict):
    machines: list[_MachineFigures] = Field(min_length=1)
    network: str | _LinkFigures | None = None
    network_cards: PositiveInt | None = None  # of a machine; the network is then one card's
    pod_machines: PositiveInt | None = None
    oversubscription: float = Field(default=1.0, ge=1.0)


def load_cluster(path: Path) -> Cluster:
    """Return the cluster described by the TOML file at ``path``.

    Raises:
        ClusterError: no such file, not TOML, or a field is missing, unknown or out of range.
    """
    try:
        figures = _ClusterFigures.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ClusterError(
            f"The cluster file {path} cannot be read.", why=str(error.strerror), attempt=_EXAMPLE
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"The cluster file {path} is not TOML.", why=str(error), attempt=_EXAMPLE
        ) from None
    except ValidationError as error:
        raise ClusterError(
            f"The cluster file {path} is not right.", why=_first_fault(error), attempt=_EXAMPLE
        ) from None
    machines = tuple(_machine(each) for each in figures.machines for _ in range(each.count))
    usual = find_device(figures.machines[0].devices[0].kind).network
    network = _link(figures.network, usual) if len(machines) > 1 else None
    if network is not None and figures.network_cards is not None:
        network = _share(network, figures.network_cards, max(len(each.devices) for each in machines))
    return Cluster(machines, network, str(path), figures.pod_machines, figures.oversubscription)


def _share(card: Link, num_cards: int, num_devices: int) -> Link:
    """One device's share of a machine's cards; no device uses more than one card."""
    share = min(num_cards / num_devices, 1.0)
    return Link(card.kind, card.bandwidth_bytes_per_s * share, card.latency_s)


def _machine(figures: _MachineFigures) -> Machine:
    devices = tuple(_device(each) for each in figures.devices for _ in range(each.count))
    usual = find_device(figures.devices[0].kind).link
    return Machine(devices, _link(figures.link, usual), failures_per_hour=figures.failures_per_hour)


def _device(figures: _Devices) -> Device:
    known = find_device(figures.kind).device
    memory_bytes = known.memory_bytes
    if figures.memory is not None:
        try:
            memory_bytes = parse_bytes(figures.memory)
        except ValueError as error:
            raise _wrong_memory(figures, str(error)) from None
        if memory_bytes == 0:
            raise _wrong_memory(figures, f"{figures.memory!r} is no memory")
    sized = with_memory(known, memory_bytes)
    rates = {name: rate * 1e12 for name, rate in (figures.tflops or {}).items()}
    return Device(
        kind=sized.kind,
        memory_bytes=sized.memory_bytes,
        flops_per_s={**sized.flops_per_s, **rates},
        memory_bandwidth_bytes_per_s=(figures.bandwidth or sized.memory_bandwidth_bytes_per_s / 1e9) * 1e9,
        reserve_bytes=sized.reserve_bytes,
    )


def _wrong_memory(figures: _Devices, why: str) -> ClusterError:
    return ClusterError(
        f"The memory of {figures.kind} in the cluster file is not right.",
        why=why,
        attempt='an amount above 0 with a unit, such as memory = "24GiB"',
    )


def _link(figures: str | _LinkFigures | None, usual: Link) -> Link:
    if figures is None:
        return usual
    if isinstance(figures, str):
        return find_link(figures)
    return Link(figures.kind, figures.bandwidth * 1e9, figures.latency_us * 1e-6)


def _first_fault(error: ValidationError) -> str:
    faults = error.errors()
    place = ".".join(str(part) for part in faults[0]["loc"]) or "the file"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{place}: {faults[0]['msg']}{more}"
