"""Fits the efficiency curves and software factors to published runs; prints them as TOML with the errors.

    python benchmarks/fit_efficiency.py RUNS.csv [--leave-one-out]

Few shared constants only: a curve for each family of devices, and one factor for each framework. The fit is
robust (soft L1) and pulled towards the values it starts from, so that little data changes little.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from outsize.cost import collective, compute, software
from outsize.planner.published_runs import PublishedRun, Unmodelled, load_runs
from outsize.planner.validation import Prediction, error_summary, predict_run

FAMILIES = ("volta", "ampere", "ampere_pcie", "hopper", "blackwell")
FIELDS = ("matmul", "attention", "bandwidth", "kernel_s")
# How far a constant may move (in logarithm) at the cost of one row's whole scale: rates of matrix products
# and of memory were measured by others, the rest is less known.
RAMP_LATENCIES = 12.0
PRIORS = {"ramp": 0.1, "matmul": 0.1, "matmul_fp8": 0.1, "bandwidth": 0.1, "attention": 0.3, "kernel_s": 0.5}
PRIOR = 0.5
# What the constants are pulled towards: matrix rates as ml-engineering's MAMF measured them, attention as the
# FlashAttention papers do (causal, forward), a usual share of memory bandwidth, and 30 us to start a kernel.
MEASURED = {
    "volta": {"matmul": 0.80, "attention": 0.4},
    "ampere": {"matmul": 0.869, "attention": 0.5},
    "ampere_pcie": {"matmul": 0.811, "attention": 0.5},
    "hopper": {"matmul": 0.804, "matmul_fp8": 0.709, "attention": 0.35},
    "blackwell": {"matmul": 0.776, "matmul_fp8": 0.763, "attention": 0.45},
}
USUAL = {"bandwidth": 0.85, "kernel_s": 3e-5}
USUAL_FACTOR = 1.1
SCALE = 0.05
STEP = 0.01


class Constants:
    """The constants being fitted, as one vector of logarithms."""

    def __init__(self, runs: list[PublishedRun]) -> None:
        used = Counter(family for run in runs for family in FAMILIES if _family(run) == family)
        self.names: list[tuple[str, str]] = [
            (family, name) for family in FAMILIES if used[family] for name in FIELDS
        ]
        self.names += [
            (family, "matmul_fp8")
            for family in ("hopper", "blackwell")
            if any(_family(run) == family and run.job.precision == "fp8" for run in runs)
        ]
        frameworks = Counter(run.software for run in runs)
        self.factors = list(frameworks)
        start = [MEASURED[family].get(name) or USUAL[name] for family, name in self.names]
        start += [USUAL_FACTOR] * len(self.factors)
        # No device exceeds its data sheet.
        most = {"matmul": 0.90, "matmul_fp8": 0.92, "attention": 0.8, "bandwidth": 0.95}
        self.most = np.full(len(start) + 1, np.inf)
        self.most[: len(self.names)] = [math.log(most.get(name, math.inf)) for _, name in self.names]
        self.start = np.log([*start, RAMP_LATENCIES])
        self.priors = np.full(len(self.start), PRIOR)
        self.priors[-1] = PRIORS["ramp"]
        self.priors[: len(self.names)] = [PRIORS[name] for _, name in self.names]

    def touched(self, runs: list[PublishedRun]) -> list[list[int]]:
        """For each constant, the rows it can change."""
        families = [_family(run) for run in runs]
        everything = list(range(len(runs)))
        by_name = [[row for row in everything if families[row] == family] for family, _ in self.names]
        by_name += [[row for row in everything if runs[row].software == name] for name in self.factors]
        return [*by_name, everything]

    def apply(self, vector: np.ndarray) -> None:
        values = np.exp(vector)
        curves = compute._curves()
        for (family, name), value in zip(self.names, values, strict=False):
            old = curves[family]
            changes = {name: float(value)}
            if name == "attention":
                changes["attention_backward"] = 0.8 * float(value)
            new = replace(old, **changes)
            for kind in [kind for kind, curve in curves.items() if curve is old]:
                curves[kind] = new
        tables = software._tables()
        for name, value in zip(self.factors, values[len(self.names) :], strict=False):
            tables[name] = replace(tables[name], factor=float(value))
        collective.RAMP_LATENCIES = float(values[-1])


def _family(run: PublishedRun) -> str:
    curves = compute._curves()
    curve = curves.get(run.job.cluster.weakest_device().kind)
    return next((family for family in FAMILIES if curves[family] is curve), "")


def _predict(run: PublishedRun) -> Prediction:
    framework = software._tables().get(run.software, run.job.software)
    return predict_run(replace(run, job=replace(run.job, software=framework)))


def fit(fitted: list[PublishedRun], evaluations: int) -> tuple[Constants, np.ndarray]:
    """Fit the constants to ``fitted`` and leave them applied."""
    sizes = Counter(run.source for run in fitted)
    weights = np.array([sizes[run.source] ** -0.1 for run in fitted])
    constants = Constants(fitted)

    def logs(vector: np.ndarray, chosen: list[PublishedRun]) -> np.ndarray:
        constants.apply(vector)
        return np.array([math.log(1 + (_predict(run).time_error or 0.0)) for run in chosen])

    def residuals(vector: np.ndarray) -> np.ndarray:
        pulled = (vector - constants.start) / constants.priors
        return np.concatenate([weights * logs(vector, fitted) / SCALE, pulled])

    def jacobian(vector: np.ndarray) -> np.ndarray:
        """By differences, for each constant over just the rows that it can change."""
        rows = np.zeros((len(fitted), len(vector)))
        base = logs(vector, fitted)
        for column, touched in enumerate(constants.touched(fitted)):
            name = column - len(constants.names)
            if 0 <= name < len(constants.factors):
                rows[touched, column] = 1.0
                continue
            moved = vector.copy()
            moved[column] += STEP
            rows[touched, column] = (logs(moved, [fitted[row] for row in touched]) - base[touched]) / STEP
        return np.concatenate([weights[:, None] * rows / SCALE, np.diag(1 / constants.priors)])

    result = least_squares(
        residuals,
        constants.start,
        jacobian,
        bounds=(-np.inf, constants.most),
        loss="soft_l1",
        max_nfev=evaluations,
    )
    constants.apply(result.x)
    return constants, result.x


def reset() -> None:
    """Put back constants that no run has touched: measured and usual ones."""
    curves, tables = compute._curves(), software._tables()
    for family in FAMILIES:
        old = curves[family]
        new = replace(old, **{"matmul_fp8": 0.70, **MEASURED[family], **USUAL})
        curves.update({kind: new for kind, curve in curves.items() if curve is old})
    tables.update({name: replace(framework, factor=USUAL_FACTOR) for name, framework in tables.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--leave-one-out", action="store_true", help="predict each source from the others")
    parser.add_argument("--evaluations", type=int, default=12)
    arguments = parser.parse_args()
    runs, _ = load_runs(arguments.runs)
    runs = [run for run in runs if run.step_time_s and _possible(run)]
    if arguments.leave_one_out:
        predictions = _leave_one_out(runs, arguments.evaluations)
    else:
        _show_constants(*fit(runs, arguments.evaluations))
        predictions = [_predict(run) for run in runs]
    summary = error_summary(predictions, lambda prediction: prediction.time_error)
    for source, figures in summary["by_source"].items():
        error, bias = figures["mean_abs_error"], figures["mean_error"]
        print(f"{source[:50]:50} {figures['num_rows']:4} {error:.3f} {bias:+.3f}")
    print(summary["num_rows"], summary["mean_abs_error"], summary["median_abs_error"])


def _publisher(run: PublishedRun) -> str:
    """Versions of one page count as one source."""
    return " ".join(run.source.split()[:2])


def _leave_one_out(runs: list[PublishedRun], evaluations: int) -> list[Prediction]:
    predictions = []
    for publisher in dict.fromkeys(map(_publisher, runs)):
        reset()
        fit([run for run in runs if _publisher(run) != publisher], evaluations)
        left = [_predict(run) for run in runs if _publisher(run) == publisher]
        errors = [abs(prediction.time_error or 0.0) for prediction in left]
        print(f"without {publisher}: {len(left)} rows, mean |error| {np.mean(errors):.3f}", flush=True)
        predictions += left
    return predictions


def _show_constants(constants: Constants, vector: np.ndarray) -> None:
    values = np.exp(vector)
    for (family, name), value in zip(constants.names, values, strict=False):
        print(f"{family}.{name} = {value:.4g}")
    for name, value in zip(constants.factors, values[len(constants.names) :], strict=False):
        print(f"{name}.factor = {value:.3f}")
    print(f"ramp_latencies = {values[-1]:.3g}")


def _possible(run: PublishedRun) -> bool:
    try:
        predict_run(run)
    except Unmodelled:
        return False
    return True


if __name__ == "__main__":
    main()
