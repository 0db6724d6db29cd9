"""Prints as JSON which model families can be recorded and split, and how exact their gradients are.

    python benchmarks/coverage.py [FAMILY ...] [--write docs/coverage.md]

Every family is cut once at every legal place (two stages) and into 2, 3 and 4 even stages; the gradients of
the stages are compared with those of the whole model in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from coverage_families import FAMILIES, Family
from outsize.errors import OutsizeError
from outsize.model.cuts import cut_points
from outsize.model.record import record_module
from sliced_run import even_cuts, run_sliced, run_whole, worst_relative_error


@dataclass(frozen=True)
class Coverage:
    """What was found for one family."""

    family: str
    rung: str
    num_cuts: int
    worst_relative_gradient_error: float | None
    record_s: float
    problem: str = ""


def cover(family: Family) -> Coverage:
    """Record a family, run it cut everywhere, and compare."""
    module, batch = family.build(), family.batch()
    started = time.perf_counter()
    try:
        program = record_module(module, batch)
        record_s = time.perf_counter() - started
        return Coverage(family.name, str(program.rung), *_worst_error(family, program), round(record_s, 3))
    except OutsizeError as error:
        elapsed = round(time.perf_counter() - started, 3)
        return Coverage(family.name, "none", 0, None, elapsed, f"{error.what} ({error.why})")
    except Exception as error:
        elapsed = round(time.perf_counter() - started, 3)
        return Coverage(family.name, "none", 0, None, elapsed, f"{type(error).__name__}: {error}"[:400])


def _worst_error(family: Family, program) -> tuple[int, float]:
    module, batch = family.build(), family.batch()
    torch.manual_seed(1)
    loss, expected = run_whole(family.build(), batch)
    positions = [cut.node_index for cut in cut_points(program)]
    tried = [[position] for position in positions]
    tried += [cuts for stages in (2, 3, 4) if (cuts := even_cuts(program, module, positions, stages))]
    worst = 0.0
    for cuts in tried:
        torch.manual_seed(1)
        found_loss, found, _ = run_sliced(program, cuts, module, batch)
        worst = max(worst, worst_relative_error(found, expected), abs(found_loss - loss) / abs(loss))
    return len(positions), worst


def table(rows: list[Coverage]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| family | recorded on | legal cuts | worst relative gradient error | recording, s |"]
    lines.append("|---|---|--:|--:|--:|")
    for row in rows:
        error = row.problem or f"{row.worst_relative_gradient_error:.0e}"
        lines.append(
            f"| {row.family} | {row.rung.replace('_', ' ')} | {row.num_cuts} | {error} | {row.record_s:.2f} |"
        )
    return "\n".join(lines)


def with_table(page: str, new: str) -> str:
    """Return a page with its one table replaced."""
    return re.sub(r"^\|.*?(?=\n\n)", lambda _: new, page, count=1, flags=re.DOTALL | re.MULTILINE)


def main() -> None:
    """Cover the families named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--write", type=Path, help="put a table in the place of the one in this page")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = [cover(FAMILIES[name]) for name in options.families]
    print(json.dumps([asdict(row) for row in rows], indent=2))
    if options.write:
        options.write.write_text(with_table(options.write.read_text(), table(rows)))


if __name__ == "__main__":
    main()
