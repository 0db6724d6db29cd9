"""One self-contained HTML page about a plan: the job, each strategy as an option, memory and timeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from outsize.cost.error_bands import describe_plan_rung
from outsize.errors import OutsizeError
from outsize.plan.plan import MEMORY_CATEGORIES, Plan, Verdict
from outsize.report.timeline_drawing import Timeline, draw_timeline
from outsize.strategies.registry import ALL_STRATEGIES
from outsize.units import format_bytes, format_seconds

__all__ = ["render_page", "write_page"]

_MAX_BARS = 16
# One colour a memory category, told apart in greyscale and by the common colour-blindnesses (Okabe-Ito).
_COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer_states": "#009e73",
    "activations": "#e69f00",
    "temporaries": "#f0e442",
    "communication_buffers": "#cc79a7",
    "reserve": "#9a9a9a",
}


@dataclass(frozen=True, slots=True)
class _Segment:
    category: str
    colour: str
    left: float  # per cent of the bar's scale
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    segments: tuple[_Segment, ...]
    limit: float
    total: str
    fits: bool


@dataclass(frozen=True, slots=True)
class _Option:
    letter: str
    name: str
    verdict: Verdict
    reached_for: str
    time: str
    bar: _Bar | None
    is_chosen: bool


def write_page(path: Path, plan: Plan) -> None:
    """Write the page about ``plan`` to ``path``.

    Raises:
        OutsizeError: the file cannot be written.
    """
    try:
        path.write_text(render_page(plan), encoding="utf-8")
    except OSError as error:
        raise OutsizeError(
            f"The page {path} cannot be written.", why=str(error.strerror), attempt="another place"
        ) from None


def render_page(plan: Plan) -> str:
    """Return the page as HTML; it loads nothing from elsewhere."""
    environment = Environment(
        loader=PackageLoader("outsize.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["bytes"] = format_bytes
    environment.filters["seconds"] = format_seconds
    environment.filters["words"] = lambda text: text.replace("_", " ")
    return environment.get_template("page.html").render(_content(plan))


def _content(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction
    parts = sorted((prediction.time_by_part_s if prediction else {}).items(), key=lambda part: -part[1])
    timeline: Timeline | None = draw_timeline(plan)
    return {
        "plan": plan,
        "mesh": " × ".join(f"{axis} {degree}" for axis, degree in plan.mesh.degrees.items() if degree > 1)
        or "one device",
        "options": _options(plan),
        "devices": _device_bars(plan),
        "num_devices": plan.mesh.world_size,
        "colours": _COLOURS,
        "parts": [
            (name, time, time / prediction.step_time_s) for name, time in parts if time > 0 and prediction
        ],
        "timeline": timeline,
        "origin": describe_plan_rung(plan),
    }


def _options(plan: Plan) -> list[_Option]:
    wanted = {strategy.name: strategy.reached_for for strategy in ALL_STRATEGIES}
    scale = max((max(each.needed_bytes, each.available_bytes) for each in plan.verdicts), default=1)
    options = []
    for letter, verdict in zip("ABCDEFGHIJ", plan.verdicts, strict=False):
        needed, available = verdict.needed_bytes, verdict.available_bytes
        options.append(
            _Option(
                letter=letter,
                name=verdict.name,
                verdict=verdict,
                reached_for=wanted.get(verdict.name, ""),
                time=format_seconds(verdict.step_time_s) if verdict.step_time_s else "",
                bar=_bar("", verdict.by_category, available, scale) if needed else None,
                is_chosen=verdict.name == plan.strategy,
            )
        )
    return options


def _device_bars(plan: Plan) -> list[_Bar]:
    """One bar a device, or where there are many one a pipeline stage."""
    if plan.prediction is None or not plan.verdicts:
        return []
    memory = plan.prediction.memory_by_rank
    per_stage = plan.mesh.world_size // plan.mesh.pp
    by_stage = len(memory) == plan.mesh.pp
    if len(memory) > _MAX_BARS and not by_stage:
        memory, by_stage = memory[::per_stage], True
    available = plan.verdicts[0].available_bytes
    scale = max(available, *(sum(categories.values()) for categories in memory))
    word = "stage" if by_stage and per_stage > 1 else "device"
    return [
        _bar(f"{word} {index}", categories, available, scale)
        for index, categories in enumerate(memory[: 4 * _MAX_BARS])
    ]


def _bar(label: str, categories: dict[str, int], available: int, scale: int) -> _Bar:
    segments, left = [], 0.0
    for name in MEMORY_CATEGORIES:
        width = 100.0 * categories.get(name, 0) / scale
        if width > 0:
            text = f"{name.replace('_', ' ')} {format_bytes(categories[name])}"
            segments.append(_Segment(name, _COLOURS[name], left, width, text))
        left += width
    total = sum(categories.values())
    return _Bar(label, tuple(segments), 100.0 * available / scale, format_bytes(total), total <= available)
