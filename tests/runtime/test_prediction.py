"""Forward-only inference through a plan returns what the whole model returns, on every process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.models import reference_model, tied_llama
from helpers.processes import run_distributed
from helpers.tiny_language_model import VOCABULARY, stage_labels, tied_model, token_batch
from outsize.errors import BatchError
from outsize.model.deferred import build_deferred
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.planner.sharding import plan_module_sharding
from outsize.planner.sharding_costs import ShardingCosts
from outsize.runtime.parallelize import parallelize
from outsize.runtime.trainer import Trainer


def make_plan(
    mesh: Mesh, labels: tuple[str, ...], schedule: ScheduleSpec, *, global_batch: int = 12, **changes: Any
) -> Plan:
    stages = tuple(StageSpec(index, label) for index, label in enumerate(labels))
    return Plan("pipeline_parallel", mesh, stages, schedule, global_batch, **changes)


PLANS = {
    1: [make_plan(Mesh(), ("",), ScheduleSpec("gpipe", 3))],
    2: [
        make_plan(Mesh(pp=2), ("", "blocks.3"), ScheduleSpec("1f1b", 4)),
        make_plan(Mesh(pp=2), stage_labels(4), ScheduleSpec("zb_v", 3, 2), gradient_accumulation_steps=2),
    ],
    4: [make_plan(Mesh(pp=2, dp=2), ("", "blocks.4"), ScheduleSpec("1f1b", 2))],
}


class Embedder(nn.Module):
    """Outputs of several kinds, nested: by sample in dim 0 or 1, of other dtypes, the same for all, none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        self.dropout = nn.Dropout(0.5)

    def forward(self, points: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.dropout(torch.tanh(self.first(points)))
        scores = self.second(hidden) * scale
        return {
            "loss": scores.square().mean(),
            "by_class": [scores.T, (scores > 0, None)],
            "norms": self.second.weight.norm(dim=1),
            "version": 7,
        }


def compare_with_whole_model(_rank: int, plans: list[Plan]) -> None:
    """Predict batches of several sizes, with labels and without, around a training step."""
    full = token_batch(12, seed=0, labels="ragged")
    for plan in plans:
        model = parallelize(tied_model, plan, sample_batch=full)
        whole = reference_model(tied_model)
        for num_samples in (12, 11, 2):
            batch = token_batch(num_samples, seed=num_samples, labels="ragged")
            wanted = whole(**batch)
            found = model.predict(batch)
            assert list(found) == ["loss", "logits"]
            torch.testing.assert_close(found, dict(wanted), rtol=1e-12, atol=1e-12)
            assert not found["logits"].requires_grad
            only = model.predict({"input_ids": batch["input_ids"]})
            torch.testing.assert_close(only, {"logits": wanted["logits"]}, rtol=1e-12, atol=1e-12)
        assert model.train_step(full).loss == pytest.approx(whole(**full)["loss"].item(), rel=1e-12)


def predict_embedder(_rank: int, plan: Plan, batch: Any) -> Any:
    return parallelize(Embedder, plan, sample_batch=batch).predict(batch)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_outputs_are_those_of_the_whole_model_on_every_process(world_size: int) -> None:
    """Logits and loss of full, uneven and short batches, without labels the logits alone; V shapes too."""
    if world_size == 1:
        compare_with_whole_model(0, PLANS[1])
    else:
        run_distributed(compare_with_whole_model, world_size, PLANS[world_size], timeout_s=90)


@pytest.mark.distributed
def test_outputs_of_any_structure_come_back_in_it() -> None:
    """Samples may be counted by another dim; dtypes, nesting, what is the same for all and None stay."""
    batch = {"points": torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    plan = make_plan(Mesh(pp=2), ("", "second"), ScheduleSpec("1f1b", 3))
    wanted = reference_model(Embedder).eval()(**batch)
    for found in run_distributed(predict_embedder, 2, plan, batch):
        assert found["by_class"][0].shape == (3, 7)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class Contrast(nn.Module):
    """Compares all samples with one another, as contrastive losses do, or takes one number of all."""

    def __init__(self, *, takes_mean: bool) -> None:
        super().__init__()
        self.inner, self.takes_mean = nn.Linear(4, 4), takes_mean

    def forward(self, points: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.inner(points)
        extra = hidden.amax() if self.takes_mean else hidden @ hidden.T
        return {"loss": hidden.square().mean(), "extra": extra}


@pytest.mark.parametrize(("takes_mean", "words"), [(True, "one value for all"), (False, "with one another")])
def test_outputs_that_need_all_samples_at_once_are_refused(takes_mean: bool, words: str) -> None:
    """They are named, with their shape; with a single micro-batch they are returned."""
    batch = {"points": torch.ones(4, 4)}
    factory = partial(Contrast, takes_mean=takes_mean)
    plan = make_plan(Mesh(), ("",), ScheduleSpec("gpipe", 2))
    with pytest.raises(BatchError, match=rf"Output 1 [\s\S]*{words}[\s\S]*one micro-batch"):
        parallelize(factory, plan, sample_batch=batch).predict(batch)
    plan = make_plan(Mesh(), ("",), ScheduleSpec("gpipe", 1))
    model = parallelize(factory, plan, sample_batch=batch)
    whole = reference_model(factory)
    torch.testing.assert_close(model.predict(batch)["extra"], whole(**batch)["extra"])


class Counting(nn.Module):
    """Returns how many samples there were, in one of several ways, and takes a table beside the samples."""

    def __init__(self, *, counts: str) -> None:
        super().__init__()
        self.inner, self.counts = nn.Linear(4, 4), counts

    def forward(self, points: torch.Tensor, table: torch.Tensor) -> dict[str, Any]:
        num_samples = len(points)
        number: Any = {
            "not": 7,
            "number": num_samples,
            "constant": torch.tensor(float(num_samples)),
            "operator": torch.full((2,), float(num_samples)) + 1,
            "structure": [7] * num_samples,
        }[self.counts]
        loss = (self.inner(points) @ table).square().mean()
        return {"loss": loss, "rows": points @ table, "number": number}


@pytest.mark.parametrize("counts", ["number", "constant", "operator", "structure"])
def test_numbers_that_follow_the_number_of_samples_are_refused(counts: str) -> None:
    """They would be those of one micro-batch; with a single micro-batch they are returned."""
    batch = {"points": torch.ones(4, 4), "table": torch.ones(4, 4)}
    factory = partial(Counting, counts=counts)
    plan = make_plan(Mesh(), ("",), ScheduleSpec("gpipe", 2))
    with pytest.raises(BatchError, match=r"model[\s\S]* follows the number of samples[\s\S]*one micro-batch"):
        parallelize(factory, plan, sample_batch=batch, shared_entries=["table"]).predict(batch)
    plan = make_plan(Mesh(), ("",), ScheduleSpec("gpipe", 1))
    found = parallelize(factory, plan, sample_batch=batch, shared_entries=["table"]).predict(batch)
    torch.testing.assert_close(found["number"], factory()(**batch)["number"])


@pytest.mark.parametrize("num_samples", [4, 3])
def test_what_samples_share_in_training_they_share_in_predictions(num_samples: int) -> None:
    """A table with as many rows as there are samples is not cut."""
    batch = {"points": torch.ones(4, 4), "table": torch.eye(4) + 1}
    plan = make_plan(Mesh(), ("",), ScheduleSpec("gpipe", 2))
    model = parallelize(partial(Counting, counts="not"), plan, sample_batch=batch, shared_entries=["table"])
    found = model.predict({**batch, "points": batch["points"][:num_samples]})
    torch.testing.assert_close(found["rows"], batch["points"][:num_samples] @ batch["table"])


def test_too_many_samples_are_refused() -> None:
    """The plan's memory is for its global batch, for inference as for training."""
    model = parallelize(tied_model, PLANS[1][0], sample_batch=token_batch(12, seed=0))
    with pytest.raises(BatchError, match="has 13 samples"):
        model.predict(token_batch(13, seed=0))


class DroppingModel(nn.Module):
    """In evaluation it runs other operators than in training; its scores are needed by no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, VOCABULARY)
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(nn.functional.dropout(hidden, 0.1, self.training))
        logits = self.head(hidden)
        outputs = {"logits": logits, "scores": logits.softmax(-1).amax(-1)}
        if labels is not None:
            outputs["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return outputs


def predict_with_split_operators(_rank: int, jobs: list[tuple[Any, Plan]]) -> list[int]:
    """Compare with the whole model; return the tokens counted in two steps of one sample of five."""
    counted = []
    for factory, plan in jobs:
        sample = token_batch(8, seed=0)
        model = parallelize(factory, plan, sample_batch=sample)
        whole = reference_model(factory).eval()
        for num_samples in (8, 5, 1):
            batch = token_batch(num_samples, seed=num_samples)
            for given in (batch, {"input_ids": batch["input_ids"]}):
                wanted = dict(whole(**given))
                found = dict(model.predict(given))
                assert set(found) == set(wanted)
                for name, tensor in found.items():
                    torch.testing.assert_close(tensor, wanted[name], rtol=1e-12, atol=1e-12)
        if factory is tied_llama:  # without dropout
            for num_samples in (5, 1):
                batch = token_batch(num_samples, seed=num_samples)
                found = model.compute_gradients(batch)
                loss = whole(**batch)["loss"]
                gradients = torch.autograd.grad(loss, list(whole.parameters()))
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                assert found.loss == pytest.approx(loss.item(), rel=1e-12)
                assert found.gradient_norm == pytest.approx(norm.item(), rel=1e-10)
            trainer = Trainer(model, _OneSample(), Path(), show_progress=False)
            counted = [trainer.train(num_steps).num_tokens for num_steps in (1, 2)]
    return counted


class _OneSample:
    """One sample of five tokens in each step."""

    def training_batch(self, step: int, _num_samples: int) -> dict[str, torch.Tensor]:
        return token_batch(1, seed=step, length=5)


def split_plan(factory: Any, mesh: Mesh, labels: tuple[str, ...]) -> Plan:
    plan = make_plan(mesh, labels, ScheduleSpec("1f1b", 4), global_batch=8)
    module = build_deferred(factory).module
    costs = ShardingCosts(2, link_latency_s=0.0, held_activation_s_per_byte=1e-9)  # all that can be split is
    return replace(plan, sharding=plan_module_sharding(module, token_batch(2, seed=0), 2, costs=costs))


@pytest.mark.distributed
@pytest.mark.parametrize("pp", [1, 2])
def test_outputs_of_split_operators_come_back_whole(pp: int, tmp_path: Path, monkeypatch: Any) -> None:
    """With labels and without, evaluation unlike training, batches that do not divide; with pipelines too.

    B57: one sample of five tokens counts five, however many processes share its operators.
    """
    monkeypatch.chdir(tmp_path)
    cuts = {1: ("", ""), 2: ("model.layers.2", "blocks.2")}[pp]
    jobs = [
        (factory, split_plan(factory, Mesh(pp=pp, tp=2), ("",) if pp == 1 else ("", cut)))
        for factory, cut in zip((tied_llama, DroppingModel), cuts, strict=True)
    ]
    assert all(plan.sharding.parameters for _, plan in jobs)
    assert run_distributed(predict_with_split_operators, 2 * pp, jobs) == [[5, 5]] * 2 * pp
