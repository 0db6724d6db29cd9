"""``outsize inspect``: what a model's forward consists of, and where it can be cut."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from outsize.model.profile import BlockProfile, ModelProfile
    from outsize.model.program import Program

__all__ = ["inspect"]


def inspect(
    model: Annotated[str, typer.Argument(help="file.py:function, package.module:function or hf:<dir>")],
    sequence: Annotated[int | None, typer.Option(help="tokens in a sample", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Record a model without memory; show its blocks, their costs, the legal cuts and warnings."""
    from rich.console import Console

    from outsize.model.argument import load_model
    from outsize.model.batch_norm import batch_norm_warnings
    from outsize.model.deferred import build_deferred
    from outsize.model.profiling import profile_recordings, record_for_profile
    from outsize.model.written_buffers import written_buffer_warnings

    source = load_model(model, sequence=sequence)
    module = build_deferred(source.factory).module
    recordings = record_for_profile(module, source.sample_batch)
    profile = profile_recordings(module, recordings, name=source.name)
    program = recordings[0].program
    program.warnings += batch_norm_warnings(module) + written_buffer_warnings(program, module)
    if as_json:
        print(json.dumps(_as_json(profile, program), indent=2))
        return
    console = Console()
    console.print(_table(profile))
    console.print(_summary(profile, program))
    for warning in program.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _as_json(profile: ModelProfile, program: Program) -> dict[str, Any]:
    guards = [asdict(guard) for guard in program.guards]
    return {**asdict(profile), "guards": guards, "warnings": program.warnings}


def _table(profile: ModelProfile) -> Table:
    from itertools import groupby

    from rich.table import Table

    table = Table(title=f"{profile.name}, for each sample", title_justify="left")
    table.add_column("blocks", overflow="fold")
    table.add_column("times", justify="right")
    table.add_column("kind", overflow="fold")
    for name in ("parameters", "forward FLOPs", "saved for backward", "sent at the cut after"):
        table.add_column(name, justify="right")
    for _, alike in groupby(profile.blocks, key=_likeness):
        _add_row(table, list(alike))
    return table


def _likeness(block: BlockProfile) -> tuple[Any, ...]:
    return block.kind, block.num_parameters, block.output_bytes


def _add_row(table: Table, blocks: list[BlockProfile]) -> None:
    from outsize.units import format_bytes, format_count

    first, last = blocks[0], blocks[-1]  # what all share, such as masks, is counted at the first alone
    table.add_row(
        first.name if len(blocks) == 1 else f"{first.name} … {last.name}",
        str(len(blocks)),
        first.kind,
        format_count(first.num_parameters) + (" (tied)" if first.num_tied_parameters else ""),
        format_count(first.forward_flops.of(1)),
        format_bytes(last.saved_activation_bytes.of(1)),
        format_bytes(first.output_bytes.of(1)),
    )


def _summary(profile: ModelProfile, program: Program) -> str:
    from outsize.cost.error_bands import describe_rung
    from outsize.units import format_bytes, format_count

    saved = sum(block.saved_activation_bytes.of(1) for block in profile.blocks)
    flops = sum(block.forward_flops.of(1) + block.backward_flops.of(1) for block in profile.blocks)
    num_cuts = sum(bool(block.cut_label) for block in profile.blocks)
    lines = [
        f"{format_count(profile.num_parameters)} parameters; for each sample {format_count(flops)} FLOPs "
        f"forward and backward, {format_bytes(saved)} saved in between",
        f"recorded on {profile.rung.replace('_', ' ')}; {num_cuts} legal cuts",
        describe_rung(profile.rung, profile.rung_reason),
    ]
    lines += [f"guarded: {guard.source} read {guard.expected} from the batch" for guard in program.guards]
    return "\n".join(lines)
