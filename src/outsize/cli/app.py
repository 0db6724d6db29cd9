"""Registers the commands and turns a user's mistake into one readable message."""

from __future__ import annotations

import sys

import typer

from outsize.cli.compare import compare
from outsize.cli.demo import demo
from outsize.cli.explain import explain
from outsize.cli.inspect import inspect
from outsize.cli.plan import plan
from outsize.cli.rules import rules
from outsize.cli.train import train
from outsize.cli.validate import validate
from outsize.errors import OutsizeError

__all__ = ["app", "main"]

app = typer.Typer(
    name="outsize",
    help="Train a PyTorch model that does not fit on one device: which technique, how to split, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(plan)
app.command()(explain)
app.command()(inspect)
app.command()(compare)
app.command()(validate)
app.command()(rules)
app.command()(train)
app.command()(demo)


@app.callback()
def _outsize() -> None:
    """Train a PyTorch model that does not fit on one device: which technique, how to split, and run it."""


def main() -> None:
    """Run the command line; mistakes of the user end with exit code 2 and no traceback."""
    try:
        app()
    except OutsizeError as error:
        print(f"outsize: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
