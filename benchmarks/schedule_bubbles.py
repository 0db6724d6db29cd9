"""Bubble rates of the Zero Bubble paper's table 5: published, simulated here, synthesised here, and bounds.

Run ``python benchmarks/schedule_bubbles.py`` (1.5B) or with ``--model 28.3B`` (a few minutes). No GPU, no
processes: times are those the paper profiled. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time

from outsize.plan.schedule_memory import StageActivations
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate
from outsize.plan.schedules import make_schedule
from outsize.plan.schedules.placement import looped_placement, v_shaped_placement
from outsize.planner.schedule_problem import Objective, ScheduleProblem
from outsize.planner.schedule_synthesis import synthesise_schedule

# F, I, W and transfer in ms as profiled by the paper's authors; layers on each rank; hidden size and heads.
MODELS = {
    "1.5B": {
        "p": 8,
        "m": 24,
        "stage": (18.522, 18.086, 9.337),
        "transfer": 0.601,
        "v": 3,
        "h": 2304,
        "a": 24,
    },
    "28.3B": {
        "p": 32,
        "m": 96,
        "stage": (10.419, 10.207, 7.715),
        "transfer": 0.408,
        "v": 2,
        "h": 6144,
        "a": 48,
    },
}
PUBLISHED = {
    "1.5B": {"1f1b": 0.243, "interleaved_1f1b": 0.106, "zb_1p": 0.159, "zb_h2": 0.108, "zb_2p": 0.043},
    "28.3B": {"1f1b": 0.265, "interleaved_1f1b": 0.149, "zb_1p": 0.142, "zb_h2": 0.064, "zb_2p": 0.004},
}


def problem(model: str, memory: float, v: int, objective: Objective) -> ScheduleProblem:
    """Return the paper's setting with ``memory`` times 1F1B's activations, stages in ``v`` parts (2: a V)."""
    setting = MODELS[model]
    p, kept, held = setting["p"], 34 * setting["h"] + 5 * setting["a"] * 1024, 32 * setting["h"]
    stage = StageTimes.split(*(milliseconds / v for milliseconds in setting["stage"]))
    return ScheduleProblem(
        times=ScheduleTimes.uniform(p * v, stage, setting["transfer"]),
        stage_to_rank=looped_placement(p, 1) if v == 1 else v_shaped_placement(p),
        num_microbatches=setting["m"],
        activations=(StageActivations(kept // v, held // v),) * (p * v),
        memory_limit_bytes=(int(memory * p * kept),) * p,
        objective=objective,
    )


def main() -> None:
    """Print both tables and the JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="1.5B")
    model = parser.parse_args().model
    setting, result = MODELS[model], {"model": model}
    work = setting["m"] * sum(setting["stage"])
    print(
        f"{model}: {setting['p']} ranks, {setting['m']} micro-batches\n\nfixed              published  here"
    )
    for name, published in PUBLISHED[model].items():
        v = setting["v"] if name.startswith("interleaved") else 1
        fixed = {"zb_1p": "zb_h1"}.get(name, name)
        if name == "zb_2p":
            print(f"{name:18s} {published:9.3f}  (a search; see 2.00 below)")
            continue
        schedule = make_schedule(
            fixed, num_ranks=setting["p"], num_microbatches=setting["m"], num_virtual_stages=v
        )
        stage = StageTimes.split(*(milliseconds / v for milliseconds in setting["stage"]))
        run = simulate(schedule, ScheduleTimes.uniform(schedule.num_stages, stage, setting["transfer"]))
        result[name] = round(run.span_bubble_rate, 4)
        print(f"{name:18s} {published:9.3f}  {run.span_bubble_rate:.4f}")
    print("\nplacement  memory  objective     best fixed           found   bound   gap     CPU s")
    for v, memory, objective in [(v, m, o) for v in (1, 2) for m in (1, 1.5, 1.75, 2) for o in Objective]:
        start = time.process_time()
        found = synthesise_schedule(problem(model, memory, v, objective))
        rate, bound = 1 - work / found.objective_s, 1 - work / found.lower_bound_s
        best = found.best_fixed
        fixed = f"{best.schedule.name} {1 - work / objective.seconds(best):.4f}" if best else "none"
        print(
            f"{'single' if v == 1 else 'V':9s}  {memory:6.2f}  {objective:12s}  {fixed:19s}  {rate:.4f}  "
            f"{bound:.4f}  {found.gap:.4f}  {time.process_time() - start:.1f}",
            flush=True,
        )
        result[f"synthesised_{'single' if v == 1 else 'v'}_{memory}p_{objective}"] = round(rate, 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
