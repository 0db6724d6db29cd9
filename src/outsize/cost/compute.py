"""Seconds that computing takes on one device: a roofline with one efficiency curve per operator kind.

A matrix product of local sizes M x K x N runs at

    rate · maximum · M/(M + half) · K/(K + half) · N/(N + half)

so that small sizes run slower; attention runs at a fixed share of the rate, and everything else at a
share of the memory bandwidth. The figures belong to a device kind and an operator kind, never to a model.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from outsize.cluster.device import Device
from outsize.model.profile import BlockProfile, OperatorProfile

__all__ = ["Efficiency", "Shards", "efficiency_of", "estimate_block_s"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet's figures that a kind of device reaches."""

    matmul: float  # of the matrix rate, for large sizes
    matmul_fp8: float  # the same in 8 bits
    matmul_half_size: float  # a dimension of this size runs at half of that
    attention: float  # of the matrix rate, in forward
    attention_backward: float  # of the matrix rate, in backward
    bandwidth: float  # of the memory bandwidth
    kernel_s: float  # the host needs to start an operator's kernels: a block takes at least their sum


@dataclass(frozen=True, slots=True)
class Shards:
    """Into how many parts operators are divided, by what they divide."""

    tensor: int = 1
    sequence: int = 1  # sequence-split norms and residuals; equals ``tensor`` or 1
    context: int = 1
    expert: int = 1


@cache
def _curves() -> dict[str, Efficiency]:
    text = files("outsize.cost").joinpath("efficiency.toml").read_text(encoding="utf-8")
    curves = {}
    for family, figures in tomllib.loads(text).items():
        curve = Efficiency(**{name: value for name, value in figures.items() if name != "devices"})
        curves.update(dict.fromkeys([family, *figures.get("devices", [])], curve))
    return curves


def efficiency_of(device: Device) -> Efficiency:
    """Return the efficiency of the device's kind, or that of accelerators in general."""
    curves = _curves()
    return curves.get(device.kind, curves["accelerator"])


def estimate_block_s(
    block: BlockProfile, device: Device, precision: str, num_samples: float, shards: Shards, scale: float
) -> tuple[float, float]:
    """Return seconds of a block's forward and backward for a micro-batch of ``num_samples``.

    ``scale`` is the element size of the precision over that of the profile's byte figures.
    """
    if block.operators:
        times = [
            _operator_s(operator, device, precision, num_samples, shards, scale)
            for operator in block.operators
        ]
        launched = len(times) * efficiency_of(device).kernel_s
        forward, backward = (sum(time[way] for time in times) for way in (0, 1))
        return max(forward, launched), max(backward, 1.5 * launched)
    return _whole_block_s(block, device, precision, num_samples, shards, scale)


def _whole_block_s(
    block: BlockProfile, device: Device, precision: str, num_samples: float, shards: Shards, scale: float
) -> tuple[float, float]:
    """Roofline of the block's totals, where its operators are not known one by one."""
    curve = efficiency_of(device)
    rate = device.rate(precision) * curve.matmul
    split = block.shardable_flops_fraction / shards.tensor + 1 - block.shardable_flops_fraction
    traffic = block.bytes_moved.of(num_samples) * scale * split / shards.context
    traffic_s = traffic / (device.memory_bandwidth_bytes_per_s * curve.bandwidth)
    forward = block.forward_flops.of(num_samples) * split / shards.context / rate
    backward = block.backward_flops.of(num_samples) * split / shards.context / rate
    return forward + traffic_s, backward + 2 * traffic_s


def _operator_s(
    operator: OperatorProfile,
    device: Device,
    precision: str,
    num_samples: float,
    shards: Shards,
    scale: float,
) -> tuple[float, float]:
    curve = efficiency_of(device)
    divided = _divisor(operator, shards)
    if operator.kind == "elementwise":
        traffic = operator.bytes_moved.of(num_samples) * scale / divided
        time = traffic / (device.memory_bandwidth_bytes_per_s * curve.bandwidth)
        return time, 1.5 * time
    flops = operator.forward_flops.of(num_samples) / divided
    if operator.kind == "attention":
        rate = device.rate("bf16" if precision == "fp8" else precision)
        return flops / (rate * curve.attention), 2.0 * flops / (rate * curve.attention_backward)
    reached = curve.matmul_fp8 if precision == "fp8" else curve.matmul
    rate = device.rate(precision) * reached * _size_efficiency(operator, curve, num_samples, shards)
    time = flops / rate
    return time, 2 * time


def _divisor(operator: OperatorProfile, shards: Shards) -> float:
    by_split = {
        "columns": shards.tensor,
        "rows": shards.tensor,
        "heads": shards.tensor,
        "tokens": shards.sequence,
    }
    return by_split.get(operator.split, 1) * shards.context


def _size_efficiency(
    operator: OperatorProfile, curve: Efficiency, num_samples: float, shards: Shards
) -> float:
    rows = operator.rows.of(num_samples) / shards.context
    inner = operator.inner / (shards.tensor if operator.split == "rows" else 1)
    columns = operator.columns / (shards.tensor if operator.split == "columns" else 1)
    half = curve.matmul_half_size
    return rows / (rows + half) * inner / (inner + half) * columns / (columns + half)
