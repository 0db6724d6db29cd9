"""The default job: judge every strategy, run the ones that split, see one fail, train with the best."""

from __future__ import annotations

from rich.console import Console

from outsize.jobs.comparison import Candidate, try_candidate
from outsize.jobs.planning import PlanRequest, plan_profile
from outsize.jobs.run_directory import choose_run_directory
from outsize.jobs.training import RunSettings, run_under_plan
from outsize.model.argument import load_model
from outsize.model.profiling import profile_model
from outsize.plan.plan import Mesh, OptimizerSpec
from outsize.report.tables import (
    category_table,
    memory_table,
    plan_summary,
    verdict_reasons,
    verdict_table,
)
from outsize.report.training_table import training_table
from outsize.report.trial_table import trial_table
from outsize.units import format_count

__all__ = ["DEMO_REQUEST", "run_demo"]

DEMO_REQUEST = PlanRequest(
    model="outsize.jobs.default_model:build",
    cluster="4xcpu:256MiB",
    global_batch=8,
    optimizer=OptimizerSpec(learning_rate=1e-3, max_gradient_norm=1.0),
)
_CANDIDATES = (
    Candidate("pipeline_parallel", Mesh(pp=4)),
    Candidate("tensor_parallel", Mesh(tp=4)),
    Candidate("combined", Mesh(pp=2, tp=2)),
    Candidate("mirrored", Mesh(dp=4)),
)


def run_demo(*, name: str, num_steps: int) -> None:
    """Run the whole job on emulated devices and print each part as it comes.

    Raises:
        LaunchError: the run directory exists.
    """
    console = Console()
    directory = choose_run_directory(name)
    source = load_model(DEMO_REQUEST.model)
    profile = profile_model(source)
    console.rule("1. Which technique trains it here?")
    result = plan_profile(profile, source, DEMO_REQUEST)
    console.print(
        f"A language model of {format_count(profile.num_parameters)} parameters, AdamW, "
        f"on {DEMO_REQUEST.cluster}: four local processes, each held to that memory."
    )
    console.print(verdict_table(result.verdicts, chosen=result.best.strategy))
    console.print(verdict_reasons(result.verdicts))
    console.print(category_table(result.verdicts))

    console.rule("2. Is that so?")
    trials = []
    for candidate in _CANDIDATES:
        with console.status(f"three steps of {candidate.strategy}"):
            trial = try_candidate(
                candidate, profile, source, DEMO_REQUEST, result.verdicts, directory / "trials"
            )
        trials.append(trial)
        if trial.failure:
            console.print(f"{candidate.strategy}: {trial.failure}", style="red", highlight=False)
    console.print(trial_table(trials))

    console.rule("3. Training with the best plan")
    console.print(plan_summary(result.best))
    settings = RunSettings(num_steps=num_steps, evaluate_every=20, num_validation_batches=2)
    reports = run_under_plan(result.best, DEMO_REQUEST, settings, directory)
    console.print(training_table(result.best, reports))
    console.print(memory_table(result.best, [report.peak_memory_bytes for report in reports]))
    console.print(f"plan, metrics and checkpoint are in {directory}/")
