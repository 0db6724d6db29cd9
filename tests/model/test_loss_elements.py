"""Counting a loss's elements from the batch alone, and the shares that follow."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from model.tiny_models import build, llama
from outsize.errors import RecordingError
from outsize.model.loss_elements import count_loss_elements, evaluate_from_batch, loss_scales
from outsize.model.record import record_module


def test_labels_that_count_are_counted_after_the_models_own_shift() -> None:
    """A causal model drops each sample's first label: 4 samples of 10 labels count 36; hidden ones less."""
    module, batch = llama()
    program = record_module(module, batch)
    assert count_loss_elements(program, batch) == [36]
    batch["labels"][1, 4:] = -100
    batch["labels"][2, :] = -100
    assert count_loss_elements(program, batch) == [36 - 6 - 9]


def test_shares_are_of_the_whole_batch_and_sums_count_as_they_are() -> None:
    """Of 10 elements in all, 4 here: 0.4; a sum has 1; a term without elements anywhere has 0."""
    x, labels = torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, -100, 1, -100])

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y.mean() + y.sum() + functional.cross_entropy(y, labels)

    program = record_module(build(Three), {"x": x, "labels": labels})
    assert count_loss_elements(program, {"x": x, "labels": labels}) == [8, 1, 2]
    assert loss_scales(program, [8, 1, 2], [20, 3, 5]) == [0.4, 1.0, 0.4]
    assert loss_scales(program, [8, 1, 0], [8, 1, 0]) == [1.0, 1.0, 0.0]


def test_what_depends_on_a_parameter_cannot_be_counted() -> None:
    """The loss itself does not follow from the batch; the message says what to do instead."""
    module, batch = llama()
    program = record_module(module, batch)
    assert program.loss_value is not None
    with pytest.raises(RecordingError, match="compute such values outside the model"):
        evaluate_from_batch(program, program.loss_value, batch)
