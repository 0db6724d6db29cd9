"""The cluster argument: ``4xcpu:1GiB``, ``2x24GiB``, ``8x8xH100``, ``16384xH100`` or a TOML file.

[machines x] devices x kind[:memory]      kind = a name from the catalog, ``cpu``, or an amount of memory
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path

from outsize.cluster.catalog import CatalogEntry, find_device, with_memory
from outsize.cluster.device import Device
from outsize.cluster.link import Link
from outsize.cluster.topology import Cluster, Machine
from outsize.errors import ClusterError
from outsize.units import MIB, parse_bytes

__all__ = ["parse_cluster"]

_FORMS = (
    "4xcpu:1GiB (emulated on this machine), 2x24GiB, 8xH100, 8x8xH100 (machines x devices), or a TOML file"
)

# What a process holds beyond its tensors: thread stacks and connections, and the slack of an allocator that
# keeps freed blocks (measured: 22 to 32 MiB on 70 to 100 MiB of tensors).
_EMULATED_RESERVE_BYTES = 10 * MIB
_EMULATED_RESERVE_SHARE = 0.25
# A device known by its memory alone is taken to be a consumer card of that size on PCIe.
_STAND_IN = "RTX3090"
_MAX_DEVICES = 1_000_000  # a slip of the keyboard must not fill the memory


def parse_cluster(argument: str, *, num_cores: int | None = None) -> Cluster:
    """Return the cluster that ``argument`` describes.

    ``num_cores`` are the cores that emulated devices share (default: those of this machine).

    Raises:
        ClusterError: not one of the forms above, zero devices, an unknown device, a bad memory or file.
    """
    text = argument.strip()
    if text.endswith(".toml") or Path(text).is_file():
        from outsize.cluster.files import load_cluster  # pydantic is slow to import

        return replace(load_cluster(Path(text)), argument=argument)
    counts, kind = _split(text)
    if 0 in counts:
        raise ClusterError(f"The cluster {argument!r} has zero devices.", attempt="at least 1: " + _FORMS)
    name, _, memory = kind.partition(":")
    if name.lower() == "cpu":
        return _emulated(argument, counts, memory, num_cores or os.cpu_count() or 1)
    return _from_catalog(argument, counts, name, memory)


def _split(text: str) -> tuple[list[int], str]:
    parts = [part.strip() for part in re.split(r"[x×*]", text, maxsplit=2)]
    counts = []
    while parts and re.fullmatch(r"[+-]?\d+", parts[0]):
        counts.append(int(parts.pop(0)))
    kind = "x".join(parts)
    if math.prod(counts) > _MAX_DEVICES:
        raise ClusterError(
            f"The cluster {text!r} has more than {_MAX_DEVICES:,} devices.", attempt="fewer: " + _FORMS
        )
    if any(count < 0 for count in counts):
        raise ClusterError(f"The cluster {text!r} has a negative number of devices.", attempt=_FORMS)
    if not kind or len(counts) > 2:
        raise ClusterError(f"The cluster {text!r} names no device.", attempt=_FORMS)
    return counts or [1], kind


def _memory(text: str) -> int:
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise ClusterError(f"{error}.", attempt="an amount with a unit, such as 24GiB") from None
    if num_bytes == 0:
        raise ClusterError("A device of the cluster has no memory (0 bytes).", attempt=_FORMS)
    return num_bytes


def _emulated(argument: str, counts: list[int], memory: str, num_cores: int) -> Cluster:
    if len(counts) > 1:
        raise ClusterError(
            f"The cluster {argument!r} asks for several emulated machines.",
            why="emulated devices are processes on this machine",
            attempt=f"{counts[0] * counts[1]}xcpu" + (f":{memory}" if memory else ""),
        )
    entry = find_device("cpu")
    memory_bytes = _memory(memory) if memory else entry.device.memory_bytes
    device = replace(
        entry.device,
        memory_bytes=memory_bytes,
        reserve_bytes=_EMULATED_RESERVE_BYTES + round(_EMULATED_RESERVE_SHARE * memory_bytes),
        is_emulated=True,
    )
    machine = Machine((device,) * counts[0], entry.link, num_cores=num_cores)
    return Cluster((machine,), network=entry.network, argument=argument)


def _from_catalog(argument: str, counts: list[int], name: str, memory: str) -> Cluster:
    is_amount = re.fullmatch(r"\d+(\.\d+)?\s*[A-Za-z]+", name) is not None and name[-1] in "bB"
    if not is_amount and name[:1].isdigit():
        raise ClusterError(
            f"{name!r} is neither a kind of device nor an amount of memory such as 24GiB.", attempt=_FORMS
        )
    entry = find_device(_STAND_IN if is_amount else name)
    device = entry.device
    if is_amount:
        device = replace(with_memory(device, _memory(name)), kind=name)
    elif memory:
        device = with_memory(device, _memory(memory))
    return _assemble(argument, counts, device, entry)


def _assemble(argument: str, counts: list[int], device: Device, entry: CatalogEntry) -> Cluster:
    if len(counts) == 2:
        num_machines, per_machine = counts
    else:
        (total,) = counts
        usual = entry.devices_per_machine
        num_machines, per_machine = (
            (total // usual, usual) if total > usual and total % usual == 0 else (1, total)
        )
        if num_machines == 1 and total > 2 * usual and usual > 2:
            raise ClusterError(
                f"{total} devices do not fill machines of {usual} {device.kind}.",
                attempt=f"{total // usual}x{usual}x{device.kind}, or machines x devices of your own",
            )
    network: Link | None = entry.network if num_machines > 1 else None
    machine = Machine((device,) * per_machine, entry.link)
    return Cluster((machine,) * num_machines, network=network, argument=argument)
