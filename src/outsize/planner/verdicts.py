"""Says for one strategy whether it fits, why or why not, and the smallest change that would make it fit."""

from __future__ import annotations

from dataclasses import replace

from outsize.cluster.topology import Cluster
from outsize.cost.layout import Job
from outsize.cost.replicas import server_traffic_s
from outsize.plan.plan import MEMORY_CATEGORIES, Mesh, Verdict
from outsize.plan.reasons import Reason, ReasonCode
from outsize.planner.evaluate import Evaluated, Evaluator, Outcome
from outsize.strategies.base import Space, Strategy
from outsize.units import format_bytes, format_count, format_seconds

__all__ = ["describe_mesh", "judge"]

_STATE = ("parameters", "gradients", "optimizer_states")
# A strategy whose step is more than this share of communication is called bound by its links.
_SLOW_LINK_SHARE = 0.5
_UNBALANCED = 1.5


def judge(strategy: Strategy, job: Job, space: Space, outcome: Outcome, refusal: Reason | None) -> Verdict:
    """Return the verdict on ``strategy`` from the outcome of its search."""
    shown = outcome.shown
    if refusal is not None or shown is None:
        reason = refusal or Reason(ReasonCode.NOT_DIVISIBLE, _undivided(job))
        return _refused(strategy, job, reason)
    memory = max(shown.estimate.memory, key=lambda categories: sum(categories.values()))
    reason = _why_it_fits(strategy, job, shown) if shown.fits else _why_not(strategy, job, shown)
    time = shown.estimate.step_time_s if shown.fits else None
    tokens = job.global_batch * job.profile.tokens_per_sample
    return Verdict(
        name=strategy.name,
        fits=shown.fits,
        needed_bytes=sum(memory.values()),
        available_bytes=job.cluster.weakest_device().memory_bytes,
        by_category={name: memory[name] for name in MEMORY_CATEGORIES},
        reason_code=reason.code,
        reason=reason.text,
        right_when=strategy.right_when,
        smallest_change="" if shown.fits else _smallest_change(strategy, job, space, shown),
        step_time_s=time,
        tokens_per_s=tokens / time if time else None,
        mesh=shown.layout.mesh,
    )


def _refused(strategy: Strategy, job: Job, reason: Reason) -> Verdict:
    change = {
        ReasonCode.ONE_DEVICE: "more devices",
        ReasonCode.NOT_DIVISIBLE: "a global batch or widths that divide by the number of devices",
    }.get(reason.code, "a model that can be cut")
    return Verdict(
        name=strategy.name,
        fits=False,
        needed_bytes=0,
        available_bytes=job.cluster.weakest_device().memory_bytes,
        by_category=dict.fromkeys(MEMORY_CATEGORIES, 0),
        reason_code=reason.code,
        reason=reason.text,
        right_when=strategy.right_when,
        smallest_change=change,
    )


def _undivided(job: Job) -> str:
    batch, devices = job.global_batch, job.cluster.num_devices
    return f"a global batch of {batch} divides over no legal mesh of {devices} devices"


def describe_mesh(mesh: Mesh) -> str:
    """Return the degrees above 1, such as ``pp=4 tp=2``; ``1 device`` if there are none."""
    degrees = [f"{axis}={degree}" for axis, degree in mesh.degrees.items() if degree > 1]
    return " ".join(degrees) or "1 device"


def _why_not(strategy: Strategy, job: Job, shown: Evaluated) -> Reason:
    memory = max(shown.estimate.memory, key=lambda categories: sum(categories.values()))
    device = job.cluster.weakest_device()
    usable = format_bytes(device.usable_bytes)
    state = sum(memory[name] for name in _STATE)
    per = job.state
    split = shown.layout.mesh.tp
    largest = max(block.num_parameters for block in job.profile.blocks)
    unit = largest * (per.parameter + per.gradient) / split
    if strategy.splits_state and unit > device.usable_bytes:
        text = f"the largest block alone needs {format_bytes(unit)} for parameters and gradients of {usable}"
        return Reason(ReasonCode.UNIT_TOO_BIG, text)
    if state > device.usable_bytes:
        return Reason(ReasonCode.STATE_TOO_BIG, _state_text(strategy, job, shown, memory, usable))
    layout = shown.layout
    text = (
        f"the state of {format_bytes(state)} fits, but activations of {format_bytes(memory['activations'])}, "
        f"temporaries of {format_bytes(memory['temporaries'])} and communication buffers of "
        f"{format_bytes(memory['communication_buffers'])} do not: micro-batches of "
        f"{layout.microbatch_size}, {max(layout.in_flight(0))} in flight, {usable} usable"
    )
    return Reason(ReasonCode.ACT_TOO_BIG, text)


def _state_text(strategy: Strategy, job: Job, shown: Evaluated, memory: dict[str, int], usable: str) -> str:
    parts = " + ".join(
        f"{name.replace('_', ' ')} {format_bytes(memory[name])}" for name in _STATE if memory[name]
    )
    if not strategy.splits_state:
        return (
            f"each device holds all {format_count(job.profile.num_parameters)} parameters: {parts}; "
            f"{usable} usable, and more devices do not change that"
        )
    return (
        f"even split {describe_mesh(shown.layout.mesh)}, the neediest device holds {parts}; {usable} usable"
    )


def _why_it_fits(strategy: Strategy, job: Job, shown: Evaluated) -> Reason:
    estimate, mesh = shown.estimate, shown.layout.mesh
    waiting = sum(estimate.by_part_s[name] for name in ("tensor_parallel", "pipeline_send", "data_parallel"))
    share = waiting / estimate.step_time_s
    where = describe_mesh(mesh)
    if (
        strategy.name == "parameter_server"
        and estimate.by_part_s["data_parallel"] > estimate.by_part_s["compute"]
    ):
        return Reason(ReasonCode.SERVER_SATURATED, _saturation(job, shown))
    if share > _SLOW_LINK_SHARE:
        return Reason(
            ReasonCode.LINK_TOO_SLOW,
            f"fits ({where}), but {format_seconds(waiting)} of a step of "
            f"{format_seconds(estimate.step_time_s)} is communication",
        )
    remark = _remark_on_replicas(strategy, job, where)
    if remark is not None:
        return remark
    imbalance = _imbalance(shown)
    if imbalance > _UNBALANCED:
        return Reason(
            ReasonCode.STAGES_UNBALANCED,
            f"fits ({where}), but the slowest stage takes {imbalance:.1f} times the mean of all",
        )
    fill = estimate.by_part_s["bubble"] / estimate.step_time_s
    text = f"fits ({where})" + (f"; {fill:.0%} of a step is idle" if mesh.pp > 1 else "")
    return Reason(ReasonCode.FITS, text)


def _remark_on_replicas(strategy: Strategy, job: Job, where: str) -> Reason | None:
    """What speaks against replicas on these machines, though they fit."""
    if strategy.name == "mirrored" and len(job.cluster.machines) > 1:
        return Reason(
            ReasonCode.ONE_HOST_ONLY, f"fits ({where}), but uses one machine of {len(job.cluster.machines)}"
        )
    if strategy.name == "multi_worker_mirrored" and len(job.cluster.machines) == 1:
        return Reason(ReasonCode.MANY_HOSTS, f"fits ({where}); on one machine it is the same as mirrored")
    if not job.cluster.is_uniform and not strategy.splits_state:
        return Reason(
            ReasonCode.UNEVEN_DEVICES, f"fits ({where}), but the slowest device sets the pace for all"
        )
    return None


def _imbalance(shown: Evaluated) -> float:
    """The slowest stage's seconds a micro-batch over the mean of all stages, from the parts of the step."""
    layout, parts = shown.layout, shown.estimate.by_part_s
    each = sum(parts[name] for name in ("compute", "recompute", "tensor_parallel", "pipeline_send"))
    slowest = each / layout.num_microbatches
    return layout.mesh.pp * slowest / (parts["bubble"] / shown.estimate.idle_share + slowest)


def _saturation(job: Job, shown: Evaluated) -> str:
    compute_s = shown.estimate.by_part_s["compute"]
    per = job.state
    num_bytes = job.profile.num_parameters * (per.parameter + per.gradient)
    workers = 1
    while workers < job.cluster.num_devices and server_traffic_s(job, workers + 1, num_bytes) <= compute_s:
        workers += 1
    return (
        f"fits, but serving {shown.layout.mesh.dp} workers takes "
        f"{format_seconds(shown.estimate.by_part_s['data_parallel'])} against {format_seconds(compute_s)} "
        f"of computing: saturated beyond {workers} worker{'s' if workers > 1 else ''}"
    )


def _smallest_change(strategy: Strategy, job: Job, space: Space, shown: Evaluated) -> str:
    """The first of: recompute, more devices, devices with more memory."""
    if not space.allows_recompute:
        again = Evaluator(job, allows_recompute=True).evaluate(shown.layout)
        if again is not None and again.fits:
            blocks = sum(mode != "none" for mode in again.assignment.recompute)
            return f"recompute the activations of {blocks} of {len(job.profile.blocks)} blocks"
    if strategy.splits_state:
        more = _enough_devices(strategy, job, space)
        if more is not None:
            return f"{more} devices instead of {job.cluster.num_devices}"
    needed = format_bytes(shown.estimate.peak_memory_bytes)
    split = "" if strategy.splits_state else ", or a strategy that splits the model"
    return f"devices of {needed} instead of {format_bytes(job.cluster.weakest_device().memory_bytes)}{split}"


def _enough_devices(strategy: Strategy, job: Job, space: Space) -> int | None:
    """The fewest devices of the same kind on which the strategy fits, up to 16 times as many."""
    num: int = job.cluster.num_devices
    few = range(num + 1, 2 * num) if num < 8 else ()
    counts: list[int] = [*few, *(factor * num for factor in (2, 3, 4, 8, 16))]
    for count in counts:
        larger = replace(job, cluster=_enlarged(job.cluster, count))
        if strategy.refusal(larger) is not None:
            continue
        layouts = (each for each in strategy.layouts(larger, space) if each.mesh.world_size == count)
        if Evaluator(larger, space.allows_recompute).fits_any(layouts):
            return count
    return None


def _enlarged(cluster: Cluster, num_devices: int) -> Cluster:
    """The same cluster with more devices: in its one machine, or in more machines like the first."""
    first = cluster.machines[0]
    if len(cluster.machines) == 1:
        machine = replace(first, devices=(first.devices[0],) * num_devices)
        return replace(cluster, machines=(machine,))
    count = -(-num_devices // len(first.devices))
    return replace(cluster, machines=(first,) * count)
