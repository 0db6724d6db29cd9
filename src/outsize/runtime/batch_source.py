"""Global batches by step, from the function that the user names or the one beside the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from outsize.errors import ModelError
from outsize.model.argument import load_function
from outsize.model.source import ModelSource, call_user_function, check_has_samples

__all__ = ["BatchSource"]


class BatchSource:
    """Calls ``batch(num_samples, step=..., split=...)`` with those of the two that the function takes.

    Every process calls it and must get the same batch. A function without ``step`` gives the same batch
    every time. Batches for validation need ``split``.
    """

    def __init__(self, source: ModelSource, data: str | None) -> None:
        self._name = data or f"{source.name} (batch)"
        self._make: Callable[..., Any] = load_function(data) if data else self._beside_model(source)
        self._takes = set(inspect.signature(self._make).parameters)

    def training_batch(self, step: int, num_samples: int) -> Any:
        """Return the global batch of a step.

        Raises:
            ModelError: the function fails, or returns no samples, or tensors without values.
        """
        return self._call(step, num_samples, "train")

    def validation_batch(self, index: int, num_samples: int) -> Any:
        """Return one of the batches to validate on, the same for the same index.

        Raises:
            ModelError: the function knows no splits, fails, or returns tensors without values.
        """
        self.check_validates()
        return self._call(index, num_samples, "validation")

    def check_validates(self) -> None:
        """Raise ModelError unless the function can give batches for validation."""
        if "split" not in self._takes:
            raise ModelError(
                f"{self._name} has no batches for validation.",
                why="Its function takes no parameter `split`.",
                attempt='batch(num_samples, step=0, split="train"), or no validation.',
            )

    def _call(self, step: int, num_samples: int, split: str) -> Any:
        options = {key: value for key, value in (("step", step), ("split", split)) if key in self._takes}
        batch = call_user_function(self._name, lambda: self._make(num_samples, **options))
        check_has_samples(batch, f"What {self._name} returned")
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(batch)):
            raise ModelError(
                f"{self._name} has no data to train on.",
                why="Its batch has shapes and no values.",
                attempt="--data file.py:function, which returns a batch for a number of samples.",
            )
        return batch

    @staticmethod
    def _beside_model(source: ModelSource) -> Callable[..., Any]:
        return source.make_batch if source.make_batch is not None else source.sample_batch
