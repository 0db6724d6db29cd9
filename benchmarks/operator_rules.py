"""Prints as JSON how many distinct operators of each model family have a split, and which have none.

python benchmarks/operator_rules.py [FAMILY ...] [--degree N]
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from coverage_families import FAMILIES, Family
from outsize.errors import OutsizeError
from outsize.model.record import record_module
from outsize.planner.operator_listing import operators_of


def count_splits(family: Family, degree: int) -> dict[str, object]:
    """Record one family as operators and find the splits of each."""
    started = time.perf_counter()
    try:
        program = record_module(family.build(), family.batch(), granularity="operators")
    except OutsizeError as error:
        return {"family": family.name, "problem": error.what}
    operators = operators_of(program, degree)
    able = sum(bool(operator.splits) for operator in operators)
    return {
        "family": family.name,
        "operators": len(operators),
        "with_a_split": able,
        "percent": round(100 * able / max(1, len(operators)), 1),
        "without": sorted({operator.name for operator in operators if not operator.splits}),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--degree", type=int, default=2)
    given = parser.parse_args()
    print(json.dumps([count_splits(FAMILIES[name], given.degree) for name in given.families]))


if __name__ == "__main__":
    main()
