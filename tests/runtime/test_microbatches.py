"""Global batches are cut into equal parts, scaled by what counts, and checked before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.errors import BatchError
from outsize.model.record import record_module
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.microbatches import BatchSplitter


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, features: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(features) * weights, labels)


def make_splitter(mesh: Mesh, replica: int, *, accumulation_steps: int = 1) -> BatchSplitter:
    plan = Plan(
        "mirrored",
        mesh,
        (StageSpec(0, ""),),
        ScheduleSpec("gpipe", 2),
        8,
        gradient_accumulation_steps=accumulation_steps,
    )
    size = plan.microbatch_size
    batch = {name: value[:size] if value.shape[0] == 8 else value for name, value in make_batch().items()}
    program = record_module(Classifier(), batch)
    return BatchSplitter(program, plan, replica, torch.device("cpu"))


def make_batch() -> dict[str, torch.Tensor]:
    labels = torch.tensor([0, -100, 1, 2, -100, -100, -100, -100])
    return {"features": torch.arange(32.0).view(8, 4), "labels": labels, "weights": torch.ones(3)}


def test_scales_are_shares_of_the_labels_that_count() -> None:
    """Three labels count: one, then two, then none; a part with none gets 0 and not 0/0 (B41)."""
    first, _ = make_splitter(Mesh(dp=2), 0).split(make_batch())
    second, totals = make_splitter(Mesh(dp=2), 1).split(make_batch())
    assert totals == [3]
    scales = [microbatch.loss_scales for part in (first, second) for microbatch in part[0]]
    assert scales == [(1 / 3,), (2 / 3,), (0.0,), (0.0,)]


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_replicas_and_steps_cover_the_batch_once_and_in_order(accumulation_steps: int) -> None:
    """Rows of all replicas, accumulation steps and micro-batches put together are the batch."""
    rows = []
    for replica in range(2):
        splitter = make_splitter(Mesh(dp=2), replica, accumulation_steps=accumulation_steps)
        steps, _ = splitter.split(make_batch())
        assert len(steps) == accumulation_steps
        rows += [microbatch.entries["features"] for step in steps for microbatch in step]
    assert torch.equal(torch.cat(rows), make_batch()["features"])


def test_entries_that_are_no_samples_go_to_every_micro_batch() -> None:
    """Class weights of three elements are not cut into eight."""
    steps, _ = make_splitter(Mesh(), 0).split(make_batch())
    assert all(microbatch.entries["weights"].shape == (3,) for microbatch in steps[0])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("features", torch.zeros(7, 4), r"shape \(7, 4\)"),
        ("features", torch.zeros(8, 5), r"shape \(8, 5\)"),
        ("labels", torch.zeros(8), "dtype torch.float32"),
        ("labels", None, "no entry 'labels'"),
    ],
)
def test_a_batch_of_another_form_is_refused(name: str, value: torch.Tensor | None, message: str) -> None:
    """B147, B153: before any communication, with the shape that the plan needs."""
    batch = make_batch()
    del batch[name]
    if value is not None:
        batch[name] = value
    with pytest.raises(BatchError, match=message):
        make_splitter(Mesh(), 0).split(batch)
