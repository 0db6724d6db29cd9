"""Holds the split of many kinds of models against one process, in float64.

    python benchmarks/operator_families.py [FAMILY ...] [--degree 2] [--table]

Every family is planned with memory dear, so that what can be split is split, and trained five AdamW steps by
``--degree`` processes over gloo, all families in one launch. Compared are losses, every gradient, parameters
and buffers. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from coverage_families import FAMILIES
from outsize.errors import OutsizeError
from split_training import MEMORY, WholeRun, run_whole, worst_difference


def run_rank(rank: int, store: str, degree: int, wholes: list[WholeRun], queue: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=degree, timeout=timedelta(seconds=60)
    )
    for whole in wholes:
        try:
            queue.put((whole.name, *worst_difference(rank, FAMILIES[whole.name], whole)))
        except Exception:
            queue.put((whole.name, float("inf"), traceback.format_exc(limit=-2)))
            raise
    dist.destroy_process_group()


def compare(names: list[str], degree: int) -> list[dict[str, object]]:
    """Return a row for each family."""
    rows: dict[str, dict[str, object]] = {}
    wholes: list[WholeRun] = []
    for name in names:
        started = time.perf_counter()
        rows[name] = {"family": name, "degree": degree}
        try:
            wholes.append(run_whole(FAMILIES[name], degree, MEMORY))
        except (OutsizeError, RuntimeError) as error:
            rows[name]["problem"] = str(error).splitlines()[0]
            continue
        sharding = wholes[-1].sharding
        rows[name] |= {
            "split_parameters": len(sharding.parameters),
            "of": len(wholes[-1].initial),
            "plan_s": round(time.perf_counter() - started, 1),
        }
    queue = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(run_rank, (f"{folder}/store", degree, wholes, queue), nprocs=degree, join=False)
        for _ in range(len(wholes) * degree):
            name, difference, where = queue.get(timeout=300)
            row = rows[name]
            if difference >= float(row.get("worst_difference", -1.0)):  # type: ignore[arg-type]
                row |= {"worst_difference": difference, "where": where}
            if difference == float("inf"):
                break
        else:
            ranks.join()
    return list(rows.values())


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| family | degree | parameters split | worst difference from one process |",
        "|---|--:|--:|--:|",
    ]
    for row in rows:
        split = f"{row.get('split_parameters', '')} of {row.get('of', '')}" if "of" in row else ""
        found = row.get("problem") or f"{row.get('worst_difference', 'not run'):.0e}"
        lines.append(f"| {row['family']} | {row['degree']} | {split} | {found} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--degree", type=int, default=2)
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = compare(given.families, given.degree)
    print(table(rows))
    print(json.dumps({"families": rows}))


if __name__ == "__main__":
    main()
