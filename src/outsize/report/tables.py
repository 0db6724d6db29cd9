"""Tables for the terminal: verdicts on every strategy, and predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from outsize.cost.goodput import Goodput
from outsize.plan.plan import Plan, Verdict
from outsize.units import format_bytes, format_seconds

__all__ = ["category_table", "goodput_summary", "memory_table", "plan_summary", "verdict_table"]


def verdict_table(verdicts: Sequence[Verdict], *, title: str = "", chosen: str = "") -> Table:
    """Return one row a strategy: fits or not, bytes needed and available, step time, reason."""
    table = Table(title=title or None, title_justify="left", expand=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("needed", justify="right", no_wrap=True)
    table.add_column("available", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    for verdict in verdicts:
        table.add_row(
            Text(f"{verdict.name} ◀" if verdict.name == chosen else verdict.name),
            Text("yes", style="green") if verdict.fits else Text("no", style="red"),
            format_bytes(verdict.needed_bytes) if verdict.needed_bytes else "–",
            format_bytes(verdict.available_bytes),
            format_seconds(verdict.step_time_s) if verdict.step_time_s else "–",
            _explanation(verdict),
        )
    return table


def _explanation(verdict: Verdict) -> Text:
    text = Text(f"{verdict.reason_code}: ", style="bold")
    text.append(verdict.reason, style="not bold")
    if verdict.smallest_change:
        text.append(f". Would fit: {verdict.smallest_change}", style="not bold dim")
    return text


def category_table(verdicts: Sequence[Verdict]) -> Table:
    """Return the bytes of each strategy's neediest device by category."""
    table = Table(title="bytes on the neediest device", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    names = list(verdicts[0].by_category)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for verdict in verdicts:
        if verdict.needed_bytes:
            sizes = (format_bytes(verdict.by_category[name]) for name in names)
            table.add_row(verdict.name, *sizes)
    return table


def memory_table(plan: Plan, measured_bytes: Sequence[int | None]) -> Table:
    """Return one row a device: predicted and measured peak memory, their ratio, and the limit."""
    table = Table(title="peak memory per device", title_justify="left")
    for column in ("device", "stage", "predicted", "measured", "difference", "limit"):
        table.add_column(column, justify="right")
    predicted = plan.prediction.memory_by_rank if plan.prediction else ()
    for rank, measured in enumerate(measured_bytes):
        expected = sum(predicted[rank].values()) if rank < len(predicted) else None
        table.add_row(
            str(rank),
            str(plan.mesh.coordinates(rank)["pp"]),
            format_bytes(expected) if expected is not None else "–",
            format_bytes(measured) if measured is not None else "–",
            f"{measured / expected - 1:+.1%}" if measured is not None and expected else "–",
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
    if plan.state_sharding != "none":
        text.append(f", {plan.state_sharding.replace('_', ' ')} sharded", style="not bold")
    if plan.prediction is not None:
        prediction = plan.prediction
        parts = sorted(prediction.time_by_part_s.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name.replace('_', ' ')} {format_seconds(time)}" for name, time in parts if time)
        text.append(
            f"\nstep {format_seconds(prediction.step_time_s)} ({shares}); "
            f"{prediction.tokens_per_s:,.0f} tokens/s; "
            f"peak {format_bytes(prediction.peak_memory_bytes)} a device",
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
