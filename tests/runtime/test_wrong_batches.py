"""Batches and arguments that cannot be right: one error that says which and why, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from helpers.processes import run_distributed
from outsize.errors import BatchError, LaunchError, ModelError, PlanError
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallel_model import ParallelModel
from outsize.runtime.parallelize import parallelize

ONE = Mesh()
NUM_TOKENS, NUM_CLASSES, NUM_POSITIONS = 10, 5, 6


class Embeddings(nn.Module):
    """A block that is recorded whole, with tables of tokens and kinds inside."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, 4)
        self.kinds = nn.EmbeddingBag(3, 4, mode="sum")

    def forward(self, tokens: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tokens(tokens) + self.kinds(kinds)[:, None]
        return embedded


class Tagger(nn.Module):
    """Two stages: tables, then classes of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.positions = nn.Parameter(torch.zeros(NUM_POSITIONS, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(
        self, tokens: torch.Tensor, kinds: torch.Tensor, labels: torch.Tensor, scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        places = torch.arange(tokens.shape[1])
        hidden = self.embeddings(tokens, kinds) + nn.functional.embedding(places, self.positions)
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(hidden) * scale
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def make_batch(length: int = 3, **changes: Any) -> dict[str, Any]:
    labels = torch.tensor([[0, 4, -100]]).expand(4, 3)[:, :length].clone()
    batch = {"tokens": torch.full((4, length), 9), "kinds": torch.zeros(4, 2).long(), "labels": labels}
    return batch | changes


def with_value(name: str, value: int) -> dict[str, Any]:
    """Return a batch whose last sample has this number."""
    batch = make_batch()
    batch[name][-1, 0] = value
    return batch


def make_model(mesh: Mesh = ONE, factory: Callable[[], nn.Module] = Tagger, **options: Any) -> ParallelModel:
    stages = (StageSpec(0, ""), StageSpec(1, "blocks.1"))[: mesh.pp]
    plan = Plan("pipeline_parallel", mesh, stages, ScheduleSpec("1f1b", 2), 4)
    return parallelize(factory, plan, sample_batch=options.pop("sample_batch", make_batch()), **options)


OUT_OF_RANGE = [
    (with_value("tokens", 10), "'tokens' holds 10", "embeddings.tokens has 10 rows: numbers 0 to 9"),
    (with_value("tokens", -1), "'tokens' holds -1", "embeddings.tokens has 10 rows"),
    (with_value("kinds", 3), "'kinds' holds 3", "embeddings.kinds has 3 rows"),
    (with_value("labels", 5), "'labels' holds 5", "5 classes, and leaves out -100: numbers 0 to 4"),
    (with_value("labels", -1), "'labels' holds -1", "5 classes"),
    (
        make_batch(8, tokens=torch.zeros(4, 8).long(), labels=torch.zeros(4, 8).long()),
        "looks up number 6",
        "has 6 rows",
    ),
]


def train_out_of_range(_rank: int) -> list[str]:
    model = make_model(Mesh(pp=2))
    model.train_step(make_batch())
    messages = []
    for batch, _, _ in OUT_OF_RANGE:
        for method in (model.train_step, model.evaluate):
            with pytest.raises(BatchError) as caught:
                method(batch)
            messages.append(str(caught.value))
    model.train_step(make_batch())
    return messages


@pytest.mark.distributed
def test_numbers_out_of_range_are_refused_on_every_rank() -> None:
    """Though one rank has the tables and another the loss; both go on with the next batch."""
    first, second = run_distributed(train_out_of_range, 2)
    assert first == second
    for number, (_, what, why) in enumerate(OUT_OF_RANGE):
        for message in first[2 * number : 2 * number + 2]:
            assert what in message
            assert why in message


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (make_batch(scale=3.0), "'scale' is 3.0, and in the sample batch 2.0"),
        (make_batch(scale=2.0, kinds=numpy.zeros((4, 2))), "'kinds' is a ndarray, not a tensor"),
        (make_batch(scale=2.0) | {name: make_batch()[name][:0] for name in make_batch()}, "has 0 samples"),
        ("a path", "holds no tensor"),
        ({"tokens": [1, 2]}, "dict of int"),
    ],
    ids=["another setting", "an array", "no samples", "a text", "lists"],
)
def test_a_batch_that_is_none_is_refused(batch: object, message: str) -> None:
    """Settings are recorded with the model: another one would be taken for the first, in silence."""
    model = make_model(sample_batch=make_batch(scale=2.0))
    with pytest.raises(BatchError, match=message):
        model.train_step(batch)
    model.train_step(make_batch(scale=2.0))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({name: value[:0] for name, value in make_batch().items()}, "has no samples"),
        (make_batch(labels=numpy.zeros(4)), "'labels' is a ndarray"),
        ({"a/b": torch.ones(2), "a": {"b": torch.ones(2)}}, "two entries of the batch have one name"),
        (None, "it is a NoneType"),
    ],
)
def test_a_sample_batch_that_is_none_is_refused(batch: object, message: str) -> None:
    """With what it is, before the model is recorded."""
    with pytest.raises(BatchError, match=message):
        make_model(sample_batch=batch)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "", None])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    """What can be used is said."""
    with pytest.raises(LaunchError, match="cannot be used here") as caught:
        make_model(device=device)
    assert "cpu" in caught.value.attempt


def test_a_module_or_a_path_in_the_wrong_place_is_refused() -> None:
    """A built module is no factory, and a plan's file is no plan."""
    module: Any = Tagger()
    with pytest.raises(ModelError, match="a Tagger was given in place of a function"):
        make_model(factory=module)
    path: Any = "plan.json"
    with pytest.raises(PlanError, match="load_plan"):
        parallelize(Tagger, path, sample_batch=make_batch())
