"""Known devices and links by name, from ``catalog.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from outsize.cluster.device import Device
from outsize.cluster.link import Link
from outsize.errors import ClusterError
from outsize.units import GIB, MIB

__all__ = ["CatalogEntry", "device_names", "find_device", "find_link", "link_names"]

# What the driver's context, NCCL and the allocator take from an accelerator before any tensor, and the
# share of memory lost to fragmentation.
CONTEXT_BYTES = 1024 * MIB
FRAGMENTATION = 0.03


class CatalogEntry:
    """A known device with the links it usually comes with."""

    def __init__(self, name: str, figures: dict[str, Any]) -> None:
        memory_bytes = round(figures["memory_gib"] * GIB)
        self.device = Device(
            kind=name,
            memory_bytes=memory_bytes,
            flops_per_s={precision: rate * 1e12 for precision, rate in figures["tflops"].items()},
            memory_bandwidth_bytes_per_s=figures["bandwidth"] * 1e9,
            reserve_bytes=0 if name == "cpu" else CONTEXT_BYTES + round(FRAGMENTATION * memory_bytes),
        )
        self.devices_per_machine: int = figures["machine"]
        self.link = find_link(figures["link"])
        self.network = find_link(figures["network"])
        self.source: str = figures["source"]


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(files("outsize.cluster").joinpath("catalog.toml").read_text(encoding="utf-8"))


def device_names() -> list[str]:
    """Return the names of all known devices."""
    return list(_tables()["devices"])


def link_names() -> list[str]:
    """Return the names of all known links."""
    return list(_tables()["links"])


@cache
def find_link(name: str) -> Link:
    """Return the link called ``name``; raise ClusterError with the nearest names if there is none."""
    key = _resolve(name, link_names(), "link")
    figures = _tables()["links"][key]
    return Link(key, figures["bandwidth"] * 1e9, figures["latency_us"] * 1e-6)


@cache
def find_device(name: str) -> CatalogEntry:
    """Return the device called ``name`` (any case, dashes optional).

    Raises:
        ClusterError: no such device; the message holds the nearest names.
    """
    key = _resolve(name, device_names(), "device")
    return CatalogEntry(key, _tables()["devices"][key])


def with_memory(device: Device, memory_bytes: int) -> Device:
    """Return ``device`` with another amount of memory and its reserve in proportion."""
    reserve = CONTEXT_BYTES + round(FRAGMENTATION * memory_bytes) if device.reserve_bytes else 0
    return replace(device, memory_bytes=memory_bytes, reserve_bytes=reserve)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _resolve(name: str, known: list[str], what: str) -> str:
    by_plain = {_plain(each): each for each in known}
    aliases = {"h100sxm": "h100", "a10080": "a100", "a100sxm": "a100", "b200sxm": "b200", "v10032": "v100"}
    plain = aliases.get(_plain(name), _plain(name))
    if plain in by_plain:
        return by_plain[plain]
    near = [by_plain[each] for each in get_close_matches(plain, by_plain, n=3, cutoff=0.5)]
    hint = f"one of the nearest names: {', '.join(near)}" if near else f"a known one: {', '.join(known)}"
    raise ClusterError(f"No {what} is called {name!r}.", attempt=hint)
