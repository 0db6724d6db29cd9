"""Plans explained in sentences, from their own numbers."""

from __future__ import annotations

from outsize.cost.error_bands import describe_plan_rung
from outsize.errors import PlanError
from outsize.plan.plan import Plan
from outsize.units import format_bytes, format_seconds

__all__ = ["explain_other_plan", "explain_plan", "explain_strategy"]


def explain_plan(plan: Plan) -> str:
    """Return what the plan's step and memory consist of, what binds it, and the verdict on every strategy."""
    lines = [f"{plan.strategy} ({_mesh(plan)}) for {plan.model} on {plan.cluster}"]
    prediction = plan.prediction
    if prediction is not None:
        lines += ["", f"A step is expected to take {format_seconds(prediction.step_time_s)}:"]
        parts = sorted(prediction.time_by_part_s.items(), key=lambda part: -part[1])
        lines += [
            f"  {time / prediction.step_time_s:6.1%}  {name.replace('_', ' ')} {format_seconds(time)}"
            for name, time in parts
            if time > 0
        ]
        lines += ["", *_memory_lines(plan)]
        lines += ["", f"Figures are {describe_plan_rung(plan)}."]
    lines += ["", "Strategies judged:"]
    for verdict in plan.verdicts:
        time = f" in {format_seconds(verdict.step_time_s)}" if verdict.step_time_s else ""
        lines.append(
            f"  {verdict.name}: {'fits' + time if verdict.fits else 'does not fit'}; {verdict.reason}"
        )
    return "\n".join(lines)


def _memory_lines(plan: Plan) -> list[str]:
    prediction = plan.prediction
    if prediction is None or not prediction.memory_by_rank:
        return []
    neediest = max(prediction.memory_by_rank, key=lambda categories: sum(categories.values()))
    rank = prediction.memory_by_rank.index(neediest)
    available = plan.verdicts[0].available_bytes if plan.verdicts else None
    of = f" of {format_bytes(available)}" if available else ""
    lines = [f"The neediest device (rank {rank}) needs {format_bytes(sum(neediest.values()))}{of}:"]
    ordered = sorted(neediest.items(), key=lambda category: -category[1])
    lines += [f"  {format_bytes(size):>10}  {name.replace('_', ' ')}" for name, size in ordered if size]
    return lines


def explain_strategy(plan: Plan, name: str) -> str:
    """Return why ``name`` is not what was planned (or that it is).

    Raises:
        PlanError: the plan holds no verdict on it.
    """
    verdict = next((each for each in plan.verdicts if each.name == name), None)
    if verdict is None:
        raise PlanError(f"The plan holds no verdict on {name}.", attempt="plan again")
    lines = [f"{name}: {verdict.reason_code}: {verdict.reason}"]
    if name == plan.strategy:
        lines.append("It is what was planned.")
    elif verdict.fits and verdict.step_time_s and plan.prediction:
        ratio = verdict.step_time_s / plan.prediction.step_time_s
        lines.append(
            f"It fits, and takes {format_seconds(verdict.step_time_s)} a step: {ratio:.2f} times the plan's "
            f"{format_seconds(plan.prediction.step_time_s)}."
        )
    elif not verdict.fits:
        available = format_bytes(verdict.available_bytes)
        lines.append(f"It needs {format_bytes(verdict.needed_bytes)} of {available} a device.")
        lines.append(f"It would fit with {verdict.smallest_change}.")
    lines.append(f"It is right when {verdict.right_when}.")
    return "\n".join(lines)


def explain_other_plan(plan: Plan, other: Plan, degrees: str) -> str:
    """Return how ``other``, planned with forced degrees, compares part by part."""
    mine, theirs = plan.prediction, other.prediction
    if mine is None or theirs is None:
        raise PlanError("The plan holds no prediction to compare with.", attempt="plan again")
    ratio = theirs.step_time_s / mine.step_time_s
    lines = [
        f"{degrees}: {format_seconds(theirs.step_time_s)} a step, {ratio:.2f} times the plan's "
        f"{format_seconds(mine.step_time_s)}; peak {format_bytes(theirs.peak_memory_bytes)} against "
        f"{format_bytes(mine.peak_memory_bytes)}"
    ]
    gaps = {
        name: theirs.time_by_part_s.get(name, 0.0) - mine.time_by_part_s.get(name, 0.0)
        for name in {**mine.time_by_part_s, **theirs.time_by_part_s}
    }
    for name, gap in sorted(gaps.items(), key=lambda item: -abs(item[1])):
        if abs(gap) > 0.005 * mine.step_time_s:
            more = "more" if gap > 0 else "less"
            lines.append(f"  {format_seconds(abs(gap))} {more} {name.replace('_', ' ')}")
    return "\n".join(lines)


def _mesh(plan: Plan) -> str:
    return (
        " ".join(f"{axis}={degree}" for axis, degree in plan.mesh.degrees.items() if degree > 1) or "1 device"
    )
