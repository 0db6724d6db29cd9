"""``outsize demo``: the default job, from verdicts to a trained model."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    name: Annotated[str, typer.Option(help="the run writes to runs/<name>")] = "default",
    steps: Annotated[int, typer.Option(help="training steps", min=1)] = 50,
) -> None:
    """Split a language model that does not fit one emulated device, in every way, and train it."""
    from outsize.jobs.demo import run_demo

    run_demo(name=name, num_steps=steps)
