"""Global batches are cut into equal parts, scaled by what counts, and checked before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.errors import BatchError
from outsize.model.batch_entries import flatten_batch
from outsize.model.deferred import build_deferred
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.executions import Executions
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.microbatches import BatchForm, BatchSplitter
from outsize.runtime.state_sharding import StateSharding


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
    entries, layout = flatten_batch(make_batch())
    here = ProcessMesh(mesh, 0, torch.device("cpu"))
    deferred, form = build_deferred(Classifier), BatchForm.of(entries)
    state = StateSharding(deferred, plan, here)
    executions = Executions(deferred, layout, form.with_samples, plan, here, state)
    return BatchSplitter(form, plan, executions, replica, torch.device("cpu"))


def rows_of(splitter: BatchSplitter, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the features of the micro-batches that count."""
    microbatches = [each for step in splitter.split(batch).accumulation_steps for each in step]
    return [each.inputs.entries["features"] for each in microbatches if any(each.inputs.loss_scales)]


def make_batch() -> dict[str, torch.Tensor]:
    labels = torch.tensor([0, -100, 1, 2, -100, -100, -100, -100])
    return {"features": torch.arange(32.0).view(8, 4), "labels": labels, "weights": torch.ones(3)}


def test_scales_are_shares_of_the_labels_that_count() -> None:
    """Three labels count: one, then two, then none; a part with none gets 0 and not 0/0 (B41)."""
    scales = []
    for replica in range(2):
        split = make_splitter(Mesh(dp=2), replica).split(make_batch())
        assert split.num_elements == [3]
        scales += [microbatch.inputs.loss_scales for microbatch in split.accumulation_steps[0]]
    assert scales == [(1 / 3,), (2 / 3,), (0.0,), (0.0,)]


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("num_samples", [8, 7, 5, 3, 1])
def test_parts_cover_any_batch_once_and_in_order(num_samples: int, accumulation_steps: int) -> None:
    """Full, uneven, and smaller than the number of parts: the rows that count are the batch (B147)."""
    batch = {name: v[:num_samples] if name != "weights" else v for name, v in make_batch().items()}
    batch["labels"] = torch.zeros(num_samples, dtype=torch.int64)
    splitters = [make_splitter(Mesh(dp=2), r, accumulation_steps=accumulation_steps) for r in range(2)]
    rows = [part for splitter in splitters for part in rows_of(splitter, batch)]
    assert torch.equal(torch.cat(rows), batch["features"])
    assert max(len(part) for part in rows) - min(len(part) for part in rows) <= 1


def test_entries_that_are_no_samples_go_to_every_micro_batch() -> None:
    """Class weights of three elements are not cut into eight."""
    (microbatches,) = make_splitter(Mesh(), 0).split(make_batch()).accumulation_steps
    assert all(each.inputs.entries["weights"].shape == (3,) for each in microbatches)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("features", torch.zeros(7, 4), "differ in their number of samples"),
        ("features", torch.zeros(8, 4, 1), r"shape \(8, 4, 1\)"),
        ("labels", torch.zeros(8), "dtype torch.float32"),
        ("labels", None, "no entry 'labels'"),
    ],
)
def test_a_batch_of_another_form_is_refused(name: str, value: torch.Tensor | None, message: str) -> None:
    """B153: on every process, before any communication."""
    batch = make_batch()
    del batch[name]
    if value is not None:
        batch[name] = value
    with pytest.raises(BatchError, match=message):
        make_splitter(Mesh(), 0).split(batch)


def test_more_samples_than_the_plan_is_for_are_refused() -> None:
    """The plan's memory is for its global batch; fewer samples are fine, more are not."""
    batch = {name: torch.cat([v, v]) if name != "weights" else v for name, v in make_batch().items()}
    with pytest.raises(BatchError, match="has 16 samples"):
        make_splitter(Mesh(), 0).split(batch)
