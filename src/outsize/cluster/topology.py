"""Machines, the links between them, and what a group of ranks has between its members.

machine 0            machine 1
[d0]=[d1]=[d2]=[d3]  [d4]=[d5]=[d6]=[d7]      = link of the machine
   └──────────── network ────────────┘        ranks number the devices from left to right
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from outsize.cluster.device import Device
from outsize.cluster.link import Link

__all__ = ["Cluster", "Machine", "Span"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices that share one fast link: a server, or a whole NVLink domain."""

    devices: tuple[Device, ...]
    link: Link
    num_cores: int | None = None  # of an emulated machine: the cores its devices share
    failures_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """How a group of ranks lies on the machines: ``num_machines`` with ``per_machine`` members each."""

    per_machine: int
    num_machines: int
    inside: Link
    across: Link | None

    @property
    def degree(self) -> int:
        """Number of members."""
        return self.per_machine * self.num_machines

    @property
    def slowest(self) -> Link:
        """The slowest link between any two members."""
        if self.across is None or (self.per_machine > 1 and self.inside.is_slower_than(self.across)):
            return self.inside
        return self.across


@dataclass(frozen=True)
class Cluster:
    """Machines, unequal ones allowed, joined by one network (its link is one device's share).

    Beyond ``pod_machines`` machines the network's bandwidth is divided by ``oversubscription``.
    """

    machines: tuple[Machine, ...]
    network: Link | None = None
    argument: str = ""
    pod_machines: int | None = None
    oversubscription: float = 1.0

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices in rank order."""
        return tuple(device for machine in self.machines for device in machine.devices)

    @cached_property
    def num_devices(self) -> int:
        """Number of devices."""
        return sum(len(machine.devices) for machine in self.machines)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all machines hold the same devices behind the same link."""
        return len(self._distinct_machines) == len(self.distinct_devices) == 1

    @cached_property
    def _first_ranks(self) -> list[int]:
        return list(accumulate((len(machine.devices) for machine in self.machines), initial=0))

    def machine_of(self, rank: int) -> int:
        """Return the index of the machine that holds ``rank``."""
        return bisect_right(self._first_ranks, rank) - 1

    def weakest_device(self, first: int = 0, stop: int | None = None) -> Device:
        """Return a device with the least memory and the lowest rates among ranks ``first``..``stop``."""
        if self.is_uniform:
            return self.devices[0]
        kinds = tuple(dict.fromkeys(map(_device_key, self.devices[first:stop])))
        devices = [key.device for key in kinds]
        if len(devices) == 1:
            return devices[0]
        precisions = set.intersection(*(set(device.flops_per_s) for device in devices))
        return Device(
            kind="/".join(dict.fromkeys(device.kind for device in devices)),
            memory_bytes=min(device.memory_bytes for device in devices),
            flops_per_s={name: min(device.rate(name) for device in devices) for name in sorted(precisions)},
            memory_bandwidth_bytes_per_s=min(device.memory_bandwidth_bytes_per_s for device in devices),
            reserve_bytes=max(device.reserve_bytes for device in devices),
            is_emulated=any(device.is_emulated for device in devices),
        )

    @cached_property
    def _spans(self) -> dict[tuple[int, int, int], Span]:
        return {}

    def span(self, stride: int, degree: int, *, world_size: int | None = None) -> Span:
        """Return the worst span of the groups ``{first + stride * i}`` within ``world_size`` ranks."""
        world_size = min(world_size or self.num_devices, self.num_devices)
        key = (stride, degree, world_size)
        if key not in self._spans:
            self._spans[key] = self._make_span(*key)
        return self._spans[key]

    def _make_span(self, stride: int, degree: int, world_size: int) -> Span:
        per_machine, num_machines, used = self._worst_placement(stride, degree, world_size)
        links = {machine.link for machine in self.machines[:used]}
        inside = min(links, key=lambda link: link.bandwidth_bytes_per_s)
        across = self._network_for(num_machines, stride) if num_machines > 1 else None
        return Span(per_machine, num_machines, inside, across)

    def _worst_placement(self, stride: int, degree: int, world_size: int) -> tuple[int, int, int]:
        """(members a machine, machines, machines in use), for the group that crosses most machines."""
        used = self.machine_of(world_size - 1) + 1
        sizes = {len(machine.devices) for machine in self.machines[:used]}
        size = min(sizes)
        if len(sizes) == 1 and (stride * degree <= size and size % (stride * degree) == 0):
            return degree, 1, used
        if len(sizes) == 1 and (stride * degree) % size == 0 and (stride % size == 0 or size % stride == 0):
            per_machine = max(size // stride, 1)
            return min(per_machine, degree), -(-degree // per_machine), used
        return *self._count_placement(stride, degree, world_size), used

    def _count_placement(self, stride: int, degree: int, world_size: int) -> tuple[int, int]:
        """Look at every group: for odd sizes and unequal machines."""
        worst = (degree, 1)
        for first in range(max(world_size - stride * (degree - 1), 1)):
            if first // stride % degree:
                continue
            num_machines = len({self.machine_of(first + stride * index) for index in range(degree)})
            if num_machines > worst[1]:
                worst = (-(-degree // num_machines), num_machines)
        return worst

    def _network_for(self, num_machines: int, stride: int) -> Link:
        assert self.network is not None, "a cluster of several machines has a network"
        reach = num_machines * max(stride // len(self.machines[0].devices), 1)
        if self.pod_machines is None or reach <= self.pod_machines:
            return self.network
        bandwidth = self.network.bandwidth_bytes_per_s / self.oversubscription
        return Link(self.network.kind, bandwidth, self.network.latency_s)

    @cached_property
    def distinct_devices(self) -> tuple[Device, ...]:
        """The devices without repeats."""
        keys = dict.fromkeys(key for machine in self._distinct_machines for key in machine[0])
        return tuple(key.device for key in keys)

    @cached_property
    def _distinct_machines(self) -> list[tuple[tuple[_DeviceKey, ...], Link, int | None]]:
        by_identity = {id(machine): machine for machine in self.machines}
        return list(dict.fromkeys(map(_machine_key, by_identity.values())))

    @cached_property
    def shared_cores(self) -> int | None:
        """Cores that all (emulated) devices share; None for real devices."""
        cores = [machine.num_cores for machine in self.machines if machine.num_cores is not None]
        return sum(cores) if cores else None


@dataclass(frozen=True, slots=True)
class _DeviceKey:
    """Compares devices by what distinguishes them; ``Device`` holds a mapping and cannot be hashed."""

    kind: str
    memory_bytes: int
    reserve_bytes: int
    device: Device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceKey) and self.device == other.device

    def __hash__(self) -> int:
        return hash((self.kind, self.memory_bytes, self.reserve_bytes))


def _device_key(device: Device) -> _DeviceKey:
    return _DeviceKey(device.kind, device.memory_bytes, device.reserve_bytes, device)


def _machine_key(machine: Machine) -> tuple[tuple[_DeviceKey, ...], Link, int | None]:
    return tuple(map(_device_key, machine.devices)), machine.link, machine.num_cores
