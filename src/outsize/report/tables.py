"""Tables for the terminal: verdicts on every strategy, and predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.cost.error_bands import describe_plan_rung
from outsize.cost.goodput import Goodput
from outsize.plan.plan import Plan, Verdict
from outsize.units import format_bytes, format_seconds

__all__ = [
    "category_table",
    "goodput_summary",
    "memory_table",
    "plan_summary",
    "verdict_reasons",
    "verdict_table",
]


# Short heads, so that the table of bytes stays within 80 columns.
_SHORT_NAMES = {
    "mirrored": "mirrored",
    "multi_worker_mirrored": "multi\nworker\nmirrored",
    "parameter_server": "param.\nserver",
    "fully_sharded": "fully\nsharded",
    "pipeline_parallel": "pipeline",
    "tensor_parallel": "tensor",
    "combined": "combined",
}


def verdict_table(verdicts: Sequence[Verdict], *, title: str = "", chosen: str = "") -> Table:
    """Return one row a strategy: fits or not, bytes needed and available, step time, reason code."""
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("strategy", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for name in ("needed", "available", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    for verdict in verdicts:
        table.add_row(
            Text(f"{verdict.name} ◀" if verdict.name == chosen else verdict.name),
            Text("yes", style="green") if verdict.fits else Text("no", style="red"),
            format_bytes(verdict.needed_bytes) if verdict.needed_bytes else "–",
            format_bytes(verdict.available_bytes),
            format_seconds(verdict.step_time_s) if verdict.step_time_s else "–",
            str(verdict.reason_code),
        )
    return table


def verdict_reasons(verdicts: Sequence[Verdict]) -> Group:
    """Return a paragraph a strategy: why, what would make it fit, and when it is right."""
    return Group(*(Padding(_paragraph(verdict), (0, 0, 1, 1)) for verdict in verdicts))


def _paragraph(verdict: Verdict) -> Text:
    text = Text(f"{verdict.name}: ", style="bold")
    text.append(f"{verdict.reason}.", style="not bold")
    if verdict.smallest_change:
        text.append(f" Would fit: {verdict.smallest_change}.", style="not bold")
    text.append(f" Right when {verdict.right_when}.", style="not bold dim")
    return text


def category_table(verdicts: Sequence[Verdict]) -> Table:
    """Return the bytes of each strategy's neediest device: one row a category, one column a strategy."""
    shown = [verdict for verdict in verdicts if verdict.needed_bytes]
    title = "bytes on the neediest device"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for verdict in shown:
        head = _SHORT_NAMES.get(verdict.name, verdict.name)
        table.add_column(head, justify="right", no_wrap=True, min_width=8)
    for category in shown[0].by_category if shown else ():
        sizes = (format_bytes(verdict.by_category[category]) for verdict in shown)
        name = category.replace("communication", "message").replace("_", "\n")
        table.add_row(name, *sizes)
    return table


def memory_table(plan: Plan, measured_bytes: Sequence[int | None]) -> Table:
    """Return one row a device: peak memory predicted for tensors and with the reserve, measured, limit.

    A measured peak holds what no tensor does (the allocator's slack, connections): that is what the
    reserve is for, so it should lie between the two predictions.
    """
    table = Table(title="peak memory per device", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("device", "stage", "predicted", "with reserve", "measured", "difference", "limit"):
        table.add_column(column, justify="right", no_wrap=True)
    predicted = plan.prediction.memory_by_rank if plan.prediction else ()
    for rank, measured in enumerate(measured_bytes):
        needed = sum(predicted[rank].values()) if rank < len(predicted) else None
        tensors = needed - predicted[rank].get("reserve", 0) if needed is not None else None
        table.add_row(
            str(rank),
            str(plan.mesh.coordinates(rank)["pp"]),
            *(format_bytes(value) if value is not None else "–" for value in (tensors, needed, measured)),
            f"{measured / tensors - 1:+.1%}" if measured is not None and tensors else "–",
            format_bytes(plan.device_memory_bytes) if plan.device_memory_bytes else "–",
        )
    return table


def plan_summary(plan: Plan) -> Text:
    """Return the plan in a few lines: mesh, schedule, predicted time and what it consists of."""
    axes = " x ".join(f"{axis} {degree}" for axis, degree in plan.mesh.degrees.items() if degree > 1)
    schedule = plan.schedule
    text = Text(f"plan: {plan.strategy}", style="bold")
    text.append(f" ({axes or 'one device'}), {schedule.num_microbatches} micro-batches", style="not bold")
    text.append(f" of {plan.microbatch_size}", style="not bold")
    if plan.mesh.pp > 1:
        chunks = f", {schedule.num_virtual_stages} virtual stages" if schedule.num_virtual_stages > 1 else ""
        text.append(f", schedule {schedule.name}{chunks}", style="not bold")
    if plan.state_sharding == "servers":
        text.append(", optimizer states on parameter servers", style="not bold")
    elif plan.state_sharding != "none":
        text.append(f", {plan.state_sharding.replace('_', ' ')} sharded", style="not bold")
    if plan.prediction is not None:
        prediction = plan.prediction
        parts = sorted(prediction.time_by_part_s.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name.replace('_', ' ')} {format_seconds(time)}" for name, time in parts if time)
        text.append(
            f"\nstep {format_seconds(prediction.step_time_s)} ({shares}); "
            f"{prediction.tokens_per_s:,.0f} tokens/s; "
            f"peak {format_bytes(prediction.peak_memory_bytes)} a device"
            f"\n{describe_plan_rung(plan)}",
            style="not bold",
        )
    return text


def goodput_summary(plan: Plan, goodput: Goodput) -> str:
    """Return how a job fares when its devices fail, in two lines."""
    tokens = goodput.share * plan.prediction.tokens_per_s if plan.prediction else 0.0
    return (
        f"with failures: one every {format_seconds(goodput.mean_time_between_failures_s)}; a checkpoint of "
        f"{format_seconds(goodput.checkpoint_s)} every {format_seconds(goodput.checkpoint_interval_s)}; "
        f"{goodput.share:.1%} of the time is kept work: {tokens:,.0f} tokens/s"
    )
