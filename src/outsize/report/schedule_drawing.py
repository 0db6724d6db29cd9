"""Draws a simulated run as a timeline, one row a rank: as text, in colour, or as an SVG picture."""

from __future__ import annotations

from html import escape

from rich.text import Text

from outsize.plan.actions import ActionKind
from outsize.plan.schedule_simulation import SimulatedRun, TimedAction
from outsize.units import format_seconds

__all__ = ["draw_as_rich_text", "draw_as_svg", "draw_as_text"]

_IDLE = "·"
_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.INPUT_GRADIENT: "input gradient",
    ActionKind.WEIGHT_GRADIENT: "weight gradient",
    ActionKind.FULL_BACKWARD: "full backward",
}
# Told apart by lightness as well as by hue.
_COLOURS = {
    ActionKind.FORWARD: "#9ec9f5",
    ActionKind.INPUT_GRADIENT: "#3f9c75",
    ActionKind.WEIGHT_GRADIENT: "#f2d16b",
    ActionKind.FULL_BACKWARD: "#2f7f5d",
}
_DARK_KINDS = (ActionKind.INPUT_GRADIENT, ActionKind.FULL_BACKWARD)

_Segment = tuple[str, ActionKind | None]  # characters, and the kind of action or None for idle time


def draw_as_text(run: SimulatedRun, *, width: int = 100) -> str:
    """Return the timeline in ``width`` columns a row; dots are idle time.

    ```
    rank 0  F0─F1─····B0────B1────
    rank 1  ···F0─B0────F1─B1─····
    ```
    """
    rows = [
        label + "".join(text for text, _kind in segments).rstrip(_IDLE)
        for label, segments in _rows(run, width)
    ]
    return "\n".join([*rows, _summary(run)])


def draw_as_rich_text(run: SimulatedRun, *, width: int = 100) -> Text:
    """Return the timeline of `draw_as_text` in colours."""
    drawing = Text(no_wrap=True)
    for label, segments in _rows(run, width):
        drawing.append(label)
        for text, kind in segments:
            drawing.append(text, style="dim" if kind is None else f"#000000 on {_COLOURS[kind]}")
        drawing.append("\n")
    drawing.append(_summary(run))
    return drawing


def draw_as_svg(run: SimulatedRun, *, width: int = 1200) -> str:
    """Return a self-contained SVG picture, ``width`` pixels wide; each action tells its times on hovering."""
    left, top, row_height = 64, 28, 26
    scale = (width - left - 8) / run.makespan_s
    height = top + row_height * len(run.timeline) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11" role="img">',
        f"<title>{escape(_summary(run))}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_svg_legend(run, left),
    ]
    for rank, actions in enumerate(run.timeline):
        y = top + row_height * rank
        parts.append(f'<text x="4" y="{y + 16}">rank {rank}</text>')
        span = f'width="{run.makespan_s * scale:.2f}" height="{row_height - 4}"'
        parts.append(f'<rect x="{left}" y="{y}" {span} fill="#eeeeee"/>')
        parts += [_svg_action(run, timed, left, y, scale, row_height - 4) for timed in actions]
    parts.append(f'<text x="{left}" y="{height - 10}">{escape(_summary(run))}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(run: SimulatedRun, width: int) -> list[tuple[str, list[_Segment]]]:
    """Return each rank's label and the segments of its row, ``width`` columns in all."""
    label_width = len(f"rank {len(run.timeline) - 1}  ")
    return [
        (f"rank {rank}".ljust(label_width), _segments(run, actions, width))
        for rank, actions in enumerate(run.timeline)
    ]


def _segments(run: SimulatedRun, actions: tuple[TimedAction, ...], width: int) -> list[_Segment]:
    segments: list[_Segment] = []
    column = 0
    for timed in actions:
        first, last = (round(second / run.makespan_s * width) for second in (timed.start_s, timed.end_s))
        if first > column:
            segments.append((_IDLE * (first - column), None))
        if last > first:
            segments.append((_cell(_label(run, timed), timed.action.kind, last - first), timed.action.kind))
        column = last
    if column < width:
        segments.append((_IDLE * (width - column), None))
    return segments


def _cell(label: str, kind: ActionKind, width: int) -> str:
    """Return the label and a line up to ``width`` columns, or the kind alone where the label has no room."""
    return (label if len(label) < width else str(kind)).ljust(width, "─")


def _label(run: SimulatedRun, timed: TimedAction) -> str:
    """Return ``F3``, or ``2F3`` where ranks hold several stages."""
    action = timed.action
    several = run.schedule.num_stages > run.schedule.num_ranks
    return str(action) if several else f"{action.kind}{action.microbatch}"


def _summary(run: SimulatedRun) -> str:
    schedule = run.schedule
    return (
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks, "
        f"{schedule.num_microbatches} micro-batches, {format_seconds(run.makespan_s)}, "
        f"idle {run.bubble_rate:.1%}, at most {max(run.peak_in_flight)} in flight"
    )


def _svg_legend(run: SimulatedRun, left: int) -> list[str]:
    kinds = {timed.action.kind for actions in run.timeline for timed in actions}
    parts = []
    for index, kind in enumerate(kind for kind in ActionKind if kind in kinds):
        x = left + 130 * index
        parts.append(f'<rect x="{x}" y="6" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="17">{kind} {_WORDS[kind]}</text>')
    return parts


def _svg_action(run: SimulatedRun, timed: TimedAction, left: int, y: int, scale: float, height: int) -> str:
    x, width = left + timed.start_s * scale, (timed.end_s - timed.start_s) * scale
    kind, stage = timed.action.kind, timed.action.stage
    times = f"{format_seconds(timed.start_s)} to {format_seconds(timed.end_s)}"
    title = f"{_WORDS[kind]} of stage {stage}, micro-batch {timed.action.microbatch}: {times}"
    # Later stages of a rank get a line below, so that a V can be followed.
    later = stage >= run.schedule.num_ranks
    line = f'<path d="M{x:.2f} {y + height - 1}h{width:.2f}" stroke="#222222" stroke-width="2"/>'
    label = _label(run, timed)
    colour = "#ffffff" if kind in _DARK_KINDS else "#111111"
    text = f'<text x="{x + 2:.2f}" y="{y + 15}" fill="{colour}">{label}</text>'
    box = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"'
    return (
        f'<g data-action="{timed.action}"><title>{title}</title>'
        f'{box} fill="{_COLOURS[kind]}" stroke="#ffffff" stroke-width="0.5"/>'
        f"{line if later else ''}{text if width > 7 * len(label) else ''}</g>"
    )
