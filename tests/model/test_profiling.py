"""Profiles against hand formulas and against what a real run keeps."""

import json
import resource
import time

import pytest
import torch
from torch import nn

from model.tiny_models import gpt2, llama, tanh_chain
from outsize.model.argument import load_model
from outsize.model.profile import ModelProfile
from outsize.model.profiling import BATCH_SIZES, profile_model, profile_recordings, record_for_profile
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.source import ModelSource, resize_batch
from outsize.model.stage_module import StageModule


def profile_of(module: nn.Module, batch: dict[str, torch.Tensor]) -> ModelProfile:
    return profile_recordings(module, record_for_profile(module, lambda n: resize_batch(batch, n)))


def saved_by_a_real_run(module: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the storages that autograd keeps, parameters and buffers left out."""
    program = record_module(module, batch)
    stage = StageModule(program, slice_program(program, [])[0], module)
    held = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage(**batch)
    assert output is not None
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in held)


@pytest.mark.parametrize("make", [llama, gpt2, tanh_chain])
@pytest.mark.parametrize("num_samples", [3, 5])
def test_saved_activation_bytes_are_those_of_a_real_run(make, num_samples) -> None:
    """The sum over blocks is exact, also at a batch size between and beyond those recorded."""
    module, batch = make(num_samples)
    predicted = sum(
        block.saved_activation_bytes.of(num_samples) for block in profile_of(module, batch).blocks
    )
    assert predicted == saved_by_a_real_run(module, batch)


def test_costs_of_a_linear_chain_equal_the_hand_formulas() -> None:
    """A layer of width 8: 2·64 FLOPs a sample forward; its weight's and its input's gradient as many each."""
    module, batch = tanh_chain()
    profile = profile_of(module, batch)
    assert [block.cut_label for block in profile.blocks] == ["", "layers.1", "layers.2", "layers.3"]
    for block in profile.blocks[1:]:
        assert block.num_parameters == 64
        assert block.parameter_bytes == 512
        assert (block.forward_flops.per_sample, block.forward_flops.fixed) == (128, 0)
        assert block.backward_flops.per_sample == 256
        assert block.recompute_input_bytes.per_sample == 64
    # the batch needs no gradient, so the first layer has only its weight's
    assert profile.blocks[0].backward_flops.per_sample == 128
    assert [block.output_bytes.per_sample for block in profile.blocks] == [64, 64, 64, 0]
    # kept: tanh's output, which is also the next layer's input; the first layer also keeps the batch
    assert [block.saved_activation_bytes.per_sample for block in profile.blocks] == [128, 64, 64, 64]


def test_parameters_add_up_and_ties_count_once() -> None:
    """A tied head brings no parameters of its own and names those it shares."""
    for tied in (False, True):
        module, batch = llama(tie_word_embeddings=tied)
        profile = profile_of(module, batch)
        assert profile.num_parameters == sum(parameter.numel() for parameter in module.parameters())
        head = profile.blocks[-1]
        assert head.tied_parameter_names == (("model.embed_tokens.weight",) if tied else ())
        assert head.num_tied_parameters == (17 * 16 if tied else 0)


def test_identical_blocks_are_of_one_kind() -> None:
    """Layers that differ in their index alone are costed once; a wider one is not of their kind."""
    module, batch = llama()
    assert len({block.kind for block in profile_of(module, batch).blocks[1:5]}) == 1
    module.model.layers[2].mlp.gate_proj = nn.Linear(16, 30, bias=False, dtype=torch.float64)
    module.model.layers[2].mlp.up_proj = nn.Linear(16, 30, bias=False, dtype=torch.float64)
    module.model.layers[2].mlp.down_proj = nn.Linear(30, 16, bias=False, dtype=torch.float64)
    kinds = [block.kind for block in profile_of(module, batch).blocks[1:5]]
    assert len(set(kinds)) == 2
    assert kinds[0] == kinds[1] == kinds[3]


def test_frozen_parameters_cost_no_weight_gradient() -> None:
    """A frozen layer has no trainable parameter and half the backward FLOPs."""
    module, batch = tanh_chain()
    module.layers[2].weight.requires_grad_(False)
    block = profile_of(module, batch).blocks[2]
    assert block.num_trainable_parameters == 0
    assert block.backward_flops.per_sample == 128


def test_temporaries_hold_the_gradients_that_flow_backward() -> None:
    """Backward of tanh and of the layer each hold two gradients of 64 bytes; a weight's has 512 bytes."""
    module, batch = tanh_chain()
    temporary = profile_of(module, batch).blocks[1].temporary_bytes
    assert (temporary.per_sample, temporary.fixed) == (128, 512)


def test_fingerprint_tells_models_apart() -> None:
    """The same model has the same fingerprint twice, another width has another."""
    first, again, other = llama(), llama(), llama(intermediate_size=32)
    prints = [profile_of(module, batch).fingerprint for module, batch in (first, again, other)]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


def test_default_job_is_profiled_without_memory() -> None:
    """A model argument is enough; tokens per sample come from the batch, sizes from the recording's dtype."""
    source = load_model("outsize.jobs.default_model:build")
    profile = profile_model(source)
    assert profile.tokens_per_sample == source.sample_batch(1)["input_ids"].shape[1]
    assert profile.bytes_per_element == 4
    assert profile.num_parameters == sum(parameter.numel() for parameter in source.factory().parameters())


def test_a_model_that_cannot_be_recorded_is_known_by_its_parameters() -> None:
    """The last rung: one block that no cut divides, 2 FLOPs a parameter forward and 4 backward."""

    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x.sum() if x.sum() > 0 else -x.sum()

    profile = profile_model(ModelSource("deciding", Deciding, lambda n: (torch.ones(n, 3),)))
    (block,) = profile.blocks
    assert profile.rung == "parameter_counts"
    assert (block.num_parameters, block.parameter_bytes, block.cut_label) == (12, 48, "")
    assert (block.forward_flops.of(1), block.backward_flops.of(1)) == (24, 48)
    assert block.saved_activation_bytes.of(2) == 2 * 48  # a guess, as the bands say
    assert "takes a number from a tensor" in profile.rung_reason


@pytest.mark.slow
def test_405_billion_parameters_are_profiled_in_seconds_without_memory(tmp_path) -> None:
    """Llama-3 405B from its published sizes: under 15 s of one core and under 1 GiB more than before."""
    settings = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    profile = profile_model(load_model(f"hf:{tmp_path}"))
    assert time.process_time() - started < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20
    assert profile.num_parameters == 405_853_388_800  # published as 405B
    assert len({block.kind for block in profile.blocks if "LlamaDecoderLayer" in block.kind}) == 1


def test_profile_of_a_source_equals_that_of_the_built_module() -> None:
    """Deferred building changes nothing in the figures."""
    module, batch = tanh_chain()
    source = ModelSource("chain", lambda: tanh_chain()[0], lambda n: resize_batch(batch, n))
    assert profile_model(source).blocks == profile_of(module, batch).blocks
    assert BATCH_SIZES[0] < BATCH_SIZES[1]
