"""A model that can be built and fed: its factory, its name and its sample batches."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from outsize.errors import BatchError, ModelError, OutsizeError
from outsize.model.batch_entries import count_samples, flatten_batch, sample_entries

__all__ = ["ModelSource", "call_user_function", "check_has_samples", "resize_batch"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    ``build`` is the user's function: it returns a module or ``(module, sample_batch)``. ``make_batch``, where
    there is one, takes the number of samples and returns a batch.
    """

    name: str
    build: Callable[[], Any]
    make_batch: Callable[[int], Any] | None = None

    def factory(self) -> nn.Module:
        """Build the module.

        Raises:
            ModelError: the user's function raises or returns something else.
        """
        return self._build()[0]

    def sample_batch(self, num_samples: int) -> Any:
        """Return a batch of ``num_samples`` samples, in the form that the model's forward takes.

        A batch returned beside the module is taken from a build on the meta device, so its tensors may have
        no values: they are enough to record and to plan, not to train.

        Raises:
            ModelError: there is no sample batch, or making it fails.
        """
        if self.make_batch is not None:
            make_batch = self.make_batch
            batch = call_user_function(self.name, lambda: make_batch(num_samples))
            check_has_samples(batch, f"batch({num_samples}) of {self.name}")
            return batch
        with torch.device("meta"):
            batch = self._build()[1]
        if batch is None:
            raise ModelError(
                f"{self.name} has no sample batch",
                why="recording calls the model's forward once, so it has to know what the model takes",
                attempt="add a function batch(num_samples) to the file, or return (module, sample_batch)",
            )
        return resize_batch(batch, num_samples)

    def shared_entries(self, sample_batch: Any) -> frozenset[str]:
        """Return the entries of a batch of :meth:`sample_batch` that one sample more does not lengthen.

        They are those with as many rows as there are samples, by chance.

        Of a batch returned beside the module nothing more than its rows is known: then there are none.

        Raises:
            ModelError: making a batch fails.
        """
        if self.make_batch is None:
            return frozenset()
        entries = flatten_batch(sample_batch)[0]
        names = sample_entries(entries)
        larger = flatten_batch(self.sample_batch(count_samples(entries, names) + 1))[0]
        return frozenset(
            name for name in names if name in larger and larger[name].shape == entries[name].shape
        )

    def _build(self) -> tuple[nn.Module, Any]:
        built = call_user_function(self.name, self.build)
        module, batch = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"{self.name} returned {_describe(built)}, not a module",
                why="a model factory returns an nn.Module or (module, sample_batch)",
                attempt="name the function that builds the model; it takes no arguments",
            )
        return module, batch


def check_has_samples(batch: Any, name: str) -> None:
    """Refuse what a user's function returned if it is no batch, or one of no samples.

    Raises:
        ModelError: with the function's name.
    """
    try:
        entries = flatten_batch(batch)[0]
    except BatchError as error:
        raise ModelError(f"{name} is no batch: {error.what}", why=error.why, attempt=error.attempt) from None
    if count_samples(entries, sample_entries(entries)) == 0:
        raise ModelError(
            f"{name} has no samples.",
            why=f"Its shapes are {', '.join(f'{key} {tuple(each.shape)}' for key, each in entries.items())}.",
            attempt="tensors with one row a sample.",
        )


def _describe(built: Any) -> str:
    if isinstance(built, type):
        return f"the class {built.__name__}"
    return "None" if built is None else f"an object of type {type(built).__name__}"


def call_user_function(name: str, function: Callable[[], Any]) -> Any:
    """Call a function of the user's; what it raises becomes a ModelError with its message and line.

    One that ends the program is no exception: nobody would learn why nothing happened.
    """
    try:
        return function()
    except OutsizeError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error).strip().splitlines()
        raise ModelError(
            f"{name} raised {type(error).__name__}: {message[0] if message else '(no message)'}",
            why=f"at {frame.filename}:{frame.lineno}: {frame.line or ''}".rstrip(": "),
            attempt="call the function by itself, outside outsize, and repair it there",
        ) from error


def resize_batch(batch: Any, num_samples: int, with_samples: Collection[str] | None = None) -> Any:
    """Return ``batch`` with ``num_samples`` samples: they repeat in turn.

    Dim 0 counts samples in the entries ``with_samples``, or else in those with as many rows as the first one
    that has dims; other entries stay as they are.
    """
    entries = flatten_batch(batch)[0]
    names = sample_entries(entries) if with_samples is None else with_samples
    of_samples = {id(entries[name]) for name in names}

    def resize(leaf: Any) -> Any:
        if id(leaf) not in of_samples or leaf.shape[0] == num_samples:
            return leaf
        if leaf.is_meta:
            return leaf.new_empty((num_samples, *leaf.shape[1:]))
        return leaf[torch.arange(num_samples, device=leaf.device) % leaf.shape[0]]

    return tree_map(resize, batch)
