"""Deferred initialisation: the values a module would have had, without ever holding it whole."""

import copy

import pytest
import torch
from torch import nn

from coverage_families import FAMILIES
from model.tiny_models import llama
from outsize.errors import ModelError
from outsize.model.deferred import DeferredModel, apply_materialised, build_deferred
from sliced_run import run_whole


def all_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def materialised(deferred: DeferredModel, **options) -> nn.Module:
    tensors = deferred.materialise(list(all_tensors(deferred.module)), **options)
    apply_materialised(deferred.module, tensors)
    return deferred.module


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "falcon", "t5", "swin", "lstm", "nn_transformer", "resnet"]
)
def test_buffers_equal_those_of_a_module_built_at_once(name: str) -> None:
    """Rows B135, B136, B139: rotary tables and other buffers, persistent or not, come back as they were."""
    family = FAMILIES[name]
    built = family.build()
    deferred = materialised(build_deferred(family.build))
    for key, buffer in built.named_buffers():
        assert torch.equal(dict(deferred.named_buffers())[key], buffer), key


@pytest.mark.slow
def test_buffers_of_every_family_are_rebuilt_and_outputs_follow() -> None:
    """Rows B136 and B137: all 36 families, element for element; with equal weights outputs are equal too."""
    for name, family in FAMILIES.items():
        built, deferred = family.build(), materialised(build_deferred(family.build))
        for key, buffer in built.named_buffers():
            assert torch.equal(dict(deferred.named_buffers())[key], buffer), f"{name}: {key}"
        deferred.load_state_dict(built.state_dict(), strict=False)
        losses = [run_whole(module, family.batch())[0] for module in (built, deferred)]
        assert losses[0] == losses[1], name


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit", "lstm", "nn_transformer", "mamba"])
def test_every_value_is_distributed_as_when_built_at_once(name: str) -> None:
    """Constants are equal, random tensors have the mean and deviation of the eagerly built ones."""
    family = FAMILIES[name]
    built = dict(family.build().named_parameters())
    for key, value in materialised(build_deferred(family.build)).named_parameters():
        eager = built[key].detach()
        if eager.numel() < 2 or eager.std() == 0:
            assert torch.equal(value, eager), key
            continue
        spread = float(eager.std()) / eager.numel() ** 0.5
        assert abs(float(value.mean() - eager.mean())) < 8 * spread, key
        assert float(value.std() / eager.std()) == pytest.approx(1, abs=4 / eager.numel() ** 0.5), key


def test_values_do_not_depend_on_what_else_is_computed() -> None:
    """Rows B100 to B108: one tensor alone, in another order or as a shard has the values it has among all."""
    deferred = build_deferred(lambda: llama()[0])
    names = list(all_tensors(deferred.module))
    together = deferred.materialise(names, seed=3)
    for name in reversed(names[::3]):
        assert torch.equal(deferred.materialise([name], seed=3)[name], together[name])
    name = "model.layers.1.mlp.up_proj.weight"
    shard = deferred.materialise([name], seed=3, select=lambda _, whole: whole.chunk(2)[1])[name]
    assert torch.equal(shard, together[name].chunk(2)[1])
    assert shard.untyped_storage().nbytes() == shard.numel() * shard.element_size()


def test_values_depend_on_the_seed_and_on_the_name() -> None:
    """Another seed gives other values, and two layers are not alike."""
    deferred = build_deferred(lambda: llama()[0])
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    values = deferred.materialise([first, second], seed=0)
    assert not torch.equal(values[first], values[second])
    assert not torch.equal(values[first], deferred.materialise([first], seed=1)[first])


def test_ties_stay_one_object() -> None:
    """Rows B28 and B29: a tied head is the embedding, before and after, and its optimizer entry is one."""
    deferred = build_deferred(lambda: llama(tie_word_embeddings=True)[0])
    assert deferred.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    module = materialised(deferred)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert len(list(module.parameters())) == len(
        torch.optim.AdamW(module.parameters()).param_groups[0]["params"]
    )
    again = copy.deepcopy(module)
    assert again.lm_head.weight is again.model.embed_tokens.weight


class Unusual(nn.Module):
    """Initialises in many ways: in part, by copying, by arithmetic, in place of another, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(4, 6))
        nn.init.orthogonal_(self.a)
        self.b = nn.Parameter(self.a.detach().clone() * 2, requires_grad=False)
        self.c = nn.Parameter(torch.zeros(5))
        with torch.no_grad():
            self.c[1:3] = torch.tensor([7.0, 8.0])
        self.register_buffer("frequencies", 1 / 100 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.bn = nn.BatchNorm1d(3)
        self.small = nn.Linear(2, 2).to(torch.bfloat16)


def test_unusual_initialisations_are_replayed() -> None:
    """Copies follow their source, slices are written in place, numbers read by the factory are right."""
    deferred = build_deferred(Unusual)
    assert all(tensor.is_meta for tensor in all_tensors(deferred.module).values())
    module = materialised(deferred, seed=5)
    torch.testing.assert_close(module.a @ module.a.T, torch.eye(4))
    assert torch.equal(module.b, 2 * module.a)
    assert not module.b.requires_grad
    assert module.a.requires_grad
    assert module.c.tolist() == [0, 7, 8, 0, 0]
    assert torch.equal(module.frequencies, 1 / 100 ** (torch.arange(0, 8, 2).float() / 8))
    assert [drop.p for drop in module.drops] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert module.bn.running_var.tolist() == [1, 1, 1]
    assert module.bn.num_batches_tracked.item() == 0
    assert module.small.weight.dtype is torch.bfloat16


def test_a_layer_of_lists_keeps_its_parameter_in_every_place() -> None:
    """Row B31: a parameter that several modules hold is put into all of them."""
    shared = {}

    def factory() -> nn.Module:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        shared["made"] = True
        return nn.Sequential(first, nn.ModuleDict({"inner": second}))

    deferred = build_deferred(factory)
    tensors = deferred.materialise(["0.weight"])
    apply_materialised(deferred.module, tensors)
    assert deferred.module[0].weight is deferred.module[1]["inner"].weight
    assert not deferred.module[0].weight.is_meta
    assert deferred.module[0].bias.is_meta


def test_building_leaves_the_callers_random_numbers_alone() -> None:
    """Neither building nor computing values moves torch's own random stream."""
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    deferred = build_deferred(lambda: nn.Linear(4, 4))
    deferred.materialise(["weight"])
    assert torch.equal(torch.rand(3), expected)


def test_mistakes_are_model_errors() -> None:
    """A factory that raises or returns something else, and a name that is not there."""
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        build_deferred(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match="returned int"):
        build_deferred(lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match="no parameter or buffer named wieght"):
        build_deferred(lambda: nn.Linear(2, 2)).materialise(["wieght"])
