"""``outsize train``: train a model under a plan, or plan first."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli.plan import parse_mesh
from outsize.plan.plan import OptimizerSpec
from outsize.runtime.environment.outsize_variables import LaunchFlags

if TYPE_CHECKING:
    from outsize.jobs.planning import PlanRequest
    from outsize.jobs.training import RunSettings

__all__ = ["train"]

_MAX_SEED = 2**63 - 1

_Denominator = Annotated[
    str | None,
    typer.Option(help="of losses: samples (exact) or replicas (the mean of each replica's own mean)"),
]
_SynchroniseBatchNorm = Annotated[
    bool, typer.Option("--synchronise-batch-norm", help="statistics over all replicas")
]
_Servers = Annotated[int | None, typer.Option(help="parameter servers, with --strategy parameter_server")]
_Updates = Annotated[
    str | None, typer.Option(help="of servers: synchronous[:backups], asynchronous, bounded:N or local:N")
]
_Partitioner = Annotated[
    str | None, typer.Option(help="how servers share a variable: fixed:4, min_size:1MiB:4 or max_size:1MiB")
]
_RowWise = Annotated[
    str | None, typer.Option(help="embeddings pulled and pushed by rows: names, with wildcards and commas")
]
_Evaluator = Annotated[bool, typer.Option("--evaluator", help="evaluate checkpoints of servers beside")]
_CheckpointEvery = Annotated[int | None, typer.Option(help="steps between checkpoints of servers")]


def train(  # noqa: PLR0913, PLR0917 - a command's options
    model: Annotated[str, typer.Argument(help="file.py:function, package.module:function or hf:<dir>")],
    plan: Annotated[Path | None, typer.Option(help="a plan file; without one, --cluster is needed")] = None,
    cluster: Annotated[str | None, typer.Option(help="4xcpu:1GiB, 2x24GiB, 8x8xH100, or a TOML file")] = None,
    global_batch: Annotated[int, typer.Option(help="samples in one step over all devices")] = 16,
    sequence: Annotated[int | None, typer.Option(help="tokens in a sample", min=1)] = None,
    strategy: Annotated[str | None, typer.Option(help="plan this strategy instead of the fastest")] = None,
    mesh: Annotated[str | None, typer.Option(help="plan this mesh, such as pp=2,tp=2")] = None,
    microbatches: Annotated[int | None, typer.Option(help="micro-batches in one step of a replica")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd")] = "adamw",
    learning_rate: Annotated[float, typer.Option(help="of the optimizer")] = 1e-3,
    max_gradient_norm: Annotated[float | None, typer.Option(help="clip gradients to this norm")] = None,
    seed: Annotated[int, typer.Option(help="of the initial values", min=0, max=_MAX_SEED)] = 0,
    steps: Annotated[int, typer.Option(help="training steps", min=1)] = 100,
    data: Annotated[str | None, typer.Option(help="file.py:function of batches")] = None,
    evaluate_every: Annotated[int, typer.Option(help="steps between evaluations; 0: one", min=0)] = 0,
    validation_batches: Annotated[int, typer.Option(help="batches of an evaluation; 0: none", min=0)] = 0,
    synchronise_batch_norm: _SynchroniseBatchNorm = False,
    denominator: _Denominator = None,
    num_machines: Annotated[int | None, typer.Option(help="machines that run this command", min=1)] = None,
    machine_rank: Annotated[int | None, typer.Option(help="which of them this is, from 0", min=0)] = None,
    master: Annotated[str | None, typer.Option(help="host:port of machine 0")] = None,
    servers: _Servers = None,
    updates: _Updates = None,
    partitioner: _Partitioner = None,
    row_wise: _RowWise = None,
    evaluator: _Evaluator = False,
    checkpoint_every: _CheckpointEvery = None,
    name: Annotated[str | None, typer.Option(help="the run writes to runs/<name>")] = None,
    resume: Annotated[bool, typer.Option(help="go on from the run's last checkpoint")] = False,
) -> None:
    """Train a model, split as a plan says; shows loss, speed, and memory predicted beside measured."""
    from outsize.jobs.planning import PlanRequest
    from outsize.jobs.server_training import ServerSettings
    from outsize.jobs.training import RunSettings

    request = PlanRequest(
        model=model,
        plan=plan,
        cluster=cluster,
        global_batch=global_batch,
        sequence=sequence,
        strategy=strategy,
        mesh=parse_mesh(mesh) if mesh else None,
        num_microbatches=microbatches,
        row_wise=row_wise,
        optimizer=OptimizerSpec(optimizer, learning_rate, max_gradient_norm=max_gradient_norm),
        seed=seed,
    )
    settings = RunSettings(
        num_steps=steps,
        data=data,
        evaluate_every=evaluate_every,
        num_validation_batches=validation_batches,
        resume=resume,
        synchronise_batch_norm=synchronise_batch_norm,
        denominator=denominator,
        servers=ServerSettings(updates, servers, partitioner, checkpoint_every, evaluator),
    )
    _train(request, settings, name, (num_machines, machine_rank, master))


_Machines = tuple[int | None, int | None, str | None]  # how many, which one this is, the first's address


def _train(request: PlanRequest, settings: RunSettings, name: str | None, machines: _Machines) -> None:
    """Train while the log is shown; the command goes along as it was typed."""
    from outsize.jobs.training import Launch, train_model

    num_machines, machine_rank, master = machines
    flags = LaunchFlags(num_machines=num_machines, machine_rank=machine_rank, master=master)
    _show_log()
    train_model(request, settings, name=name, launch=Launch(flags, sys.argv[1:]))


class _StandardErrorHandler(logging.Handler):
    """Writes to what standard error is at the time, which a caller may redirect."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def _show_log() -> None:
    """Show what the package logs, such as who started the process, on standard error."""
    logger = logging.getLogger("outsize")
    if not logger.handlers:
        logger.addHandler(_StandardErrorHandler())
    logger.setLevel(logging.INFO)
