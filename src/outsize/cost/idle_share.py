"""Idle time of a schedule as a share of 1F1B's with as many stages.

Schedules that compute weights' gradients apart fill idle time with them. With w the share of a micro-batch's
time that these take, each fills so much of the (p - 1) t that 1F1B idles (times as in Qi et al. 2023, table
2, of the longest span of a rank):

    ZB-H1  1 - 2 w        ZB-H2  1 - 3 w        ZB-V  (1 - 3 w) / 2
    V-half 1 - 1/(2(p-1)) - w (5p/4 - 2)/(p-1)

and no less than zero, or, where all ranks end a step together, than what the last input gradient's way back
takes. `outsize.plan.schedule_simulation` gives the same numbers, which a test checks.
"""

from __future__ import annotations

from outsize.cost.layout import Layout

__all__ = ["idle_share"]

_LEAST = 1e-3  # of what is never exactly nothing


def idle_share(layout: Layout, weight_share: float, *, ends_together: bool = True) -> float:
    """Return the idle time of ``layout``'s schedule over that of 1F1B with one stage a rank.

    ``weight_share`` is the share of a micro-batch's time in which weights' gradients are computed.
    """
    w, name = weight_share, layout.schedule
    way_back = (1 - w) / 2 if ends_together else 0.0
    if name == "zb_h1":
        share = max(1 - 2 * w, (1 - w) / 2)
    elif name == "zb_h2":
        share = max(1 - 3 * w, way_back)
    elif name == "zb_2p":  # a search in as much memory fills one gradient more
        share = max(1 - 4 * w, way_back)
    elif name == "zb_v":
        share = max((1 - 3 * w) / 2, way_back / 2)
    elif name == "v_half":
        gaps = layout.mesh.pp - 1
        share = 1 - 0.5 / gaps - w * (1.25 * layout.mesh.pp - 2) / gaps
    else:
        share = 1.0 / layout.num_virtual_stages
    return max(share, _LEAST)
