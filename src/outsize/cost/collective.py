"""Seconds a collective takes: latency and bandwidth of each level it crosses.

With n members and ``bytes`` held by each, a ring moves (Thakur et al. 2005):
all-reduce 2 (n-1)/n · bytes, all-gather and reduce-scatter (n-1)/n · bytes, all-to-all (n-1)/n · bytes.
A group over several machines works level by level: reduce-scatter inside, all-reduce of the pieces across
the network, all-gather inside. Large messages pass the levels in pieces, all levels at once, so the slowest
level sets the time; latencies, and the time until pieces flow, add up. Numbers of bytes may be arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outsize.cluster.link import Link
from outsize.cluster.topology import Span

__all__ = ["all_gather_s", "all_reduce_s", "all_to_all_s", "reduce_scatter_s", "send_s"]

# A ring cuts a message into pieces and needs a while until they flow: this many latencies of the link a pass,
# or as long again as the message itself takes, if that is less. (8 x H200, all-reduce: 16 MiB takes 61 us and
# 256 MiB 103 us longer than at full bandwidth; 4 x 8 B200 over Ethernet, 128 MiB 630 us.)
RAMP_LATENCIES = 15.4


def _steps(link: Link, members: int) -> float:
    return link.latency_s * math.ceil(math.log2(members)) if members > 1 else 0.0


def _ring_s(link: Link, members: int, num_bytes: Any) -> Any:
    """One pass over a ring (all-gather or reduce-scatter of ``num_bytes`` in all) at full bandwidth."""
    return num_bytes * (members - 1) / members / link.bandwidth_bytes_per_s


def _ramp_s(link: Link, time: Any) -> Any:
    return np.minimum(RAMP_LATENCIES * link.latency_s, time)


def all_gather_s(span: Span, num_bytes: Any) -> Any:
    """Seconds until every member holds the ``num_bytes`` that all members held in parts."""
    inside = _ring_s(span.inside, span.per_machine, num_bytes)
    waits = _ramp_s(span.inside, inside) + _steps(span.inside, span.per_machine)
    if span.across is None:
        return inside + waits
    across = _ring_s(span.across, span.num_machines, num_bytes / span.per_machine)
    waits += _ramp_s(span.across, across) + _steps(span.across, span.num_machines)
    return np.maximum(inside, across) + waits


def reduce_scatter_s(span: Span, num_bytes: Any) -> Any:
    """Seconds to sum ``num_bytes`` over the members and leave each with its part."""
    return all_gather_s(span, num_bytes)


def all_reduce_s(span: Span, num_bytes: Any) -> Any:
    """Seconds to sum ``num_bytes`` over the members, the sum being left with all of them."""
    return 2 * all_gather_s(span, num_bytes)


def all_to_all_s(span: Span, num_bytes: float, num_copies: int = 1, max_machines: int = 0) -> float:
    """Seconds in which each member sends ``num_bytes`` in equal parts to all members.

    Where the bytes are ``num_copies`` copies for members drawn at random, those for one machine travel
    once: of H machines, H (1 - (1 - 1/H)^k) are hit, or ``max_machines`` where routing keeps to so many.
    """
    n = span.degree
    if n <= 1:
        return 0.0
    if span.across is None:
        return num_bytes * (n - 1) / n / span.inside.bandwidth_bytes_per_s + _steps(span.inside, n)
    machines = span.num_machines
    hit = machines * (1 - (1 - 1 / machines) ** num_copies)
    hit = min(hit, max_machines) if max_machines else hit
    leaving = num_bytes * hit / num_copies * (n - span.per_machine) / n
    return leaving / span.across.bandwidth_bytes_per_s + _steps(span.across, n)


def send_s(link: Link, num_bytes: float) -> float:
    """Seconds to send ``num_bytes`` to one other device."""
    return num_bytes / link.bandwidth_bytes_per_s + link.latency_s
