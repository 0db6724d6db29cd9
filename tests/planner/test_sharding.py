"""The search finds the known ways to split a network, without a hint."""

import math
import time
from collections import Counter

import pytest
import torch
from torch import nn

from outsize.errors import PlanError
from outsize.model.operator_rules.shards import local_shape
from outsize.model.program import NodeKind, Program
from outsize.model.record import record_module
from outsize.plan.sharding import Sharding
from outsize.planner.sharding import MemoryLimit, plan_module_sharding, plan_sharding
from outsize.planner.sharding_costs import GLOO_SCATTER_PASSES, ShardingCosts
from outsize.planner.sharding_overrides import ShardingOverrides
from outsize.planner.sharding_problem import LimitError
from outsize.runtime.collectives import Conversion, OwnRandomStream
from outsize.runtime.tensor_parallel import lower, parameter_placements


def record(module: nn.Module, batch) -> Program:
    return record_module(module.to("meta"), batch, granularity="operators")


def tokens(num_samples: int, num_tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(num_samples, num_tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def llama(**changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**settings | changes))


def gpt2(**changes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        settings = {"vocab_size": 32000, "n_embd": 1024, "n_head": 16, "n_layer": 3, "n_positions": 512}
        return GPT2LMHeadModel(GPT2Config(**settings | changes))


def conversions(program: Program, sharding: Sharding, module_path: str) -> Counter[str]:
    """Count the conversions before nodes of one module that move values of more than one dim."""
    lowered = lower(program, sharding)
    return Counter(
        f"{node.target.before} -> {node.target.after}"
        for node in lowered.nodes
        if isinstance(node.target, Conversion)
        and node.module_path.startswith(module_path)
        and len(lowered.specs[node.outputs[0]].shape) > 1
    )


def texts(sharding: Sharding, part: str) -> dict[str, str]:
    return {name: text for name, text in sharding.parameters.items() if part in name}


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(512, 2048), nn.Linear(512, 2048)
        self.down = nn.Linear(2048, 512)

    def forward(self, x):
        return (x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))).square().sum()


def test_a_gated_mlp_is_split_by_columns_then_rows():
    """One sum after the second product is all the communication of the forward."""
    program = record(GatedMlp(), torch.zeros(1, 256, 512))
    sharding = plan_sharding(program, 2)
    assert sharding.parameters["gate.weight"] == sharding.parameters["up.weight"] == "S0"
    assert sharding.parameters["gate.bias"] == "S0"
    assert sharding.parameters["down.weight"] == "S1"
    found = conversions(program, sharding, "")
    assert sum(count for name, count in found.items() if name.startswith("P ->")) == 1


@pytest.mark.parametrize("degree", [2, 8])
def test_llama_is_split_by_heads_columns_rows_and_vocabulary(degree):
    """Two collectives a block and direction, as by hand; logits are never gathered."""
    program = record(llama(), tokens(1, 511))  # an odd length: the sequence cannot be split
    sharding = plan_sharding(program, degree)
    layer = texts(sharding, "layers.1.")
    prefix = "model.layers.1."
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert all(layer[f"{prefix}{name}.weight"] == "S0" for name in columns)
    assert all(layer[f"{prefix}{name}.weight"] == "S1" for name in ("self_attn.o_proj", "mlp.down_proj"))
    assert sharding.parameters["lm_head.weight"] == "S0"
    if degree == 2:  # at 8 it also splits the residual along its width
        assert conversions(program, sharding, "model.layers.1") == {"P -> R": 2, "R -> R~": 2}
    lowered = lower(program, sharding)
    largest = max((lowered.specs[v].shape for n in lowered.nodes for v in n.outputs), key=lambda s: s[-1:])
    assert largest[-1] == 32000 // degree


def test_a_tied_embedding_is_split_over_the_vocabulary_at_both_ends():
    """One placement serves the look-up, by a mask, and the head."""
    program = record(llama(tie_word_embeddings=True), tokens(1, 511))
    sharding = plan_sharding(program, 4)
    assert sharding.parameters["model.embed_tokens.weight"] == "S0"
    kernels = {rule.kernel for rule in sharding.rules} - {""}
    assert kernels >= {"row_split_embedding", "class_split_log_softmax", "class_split_nll_loss"}


def test_dropout_on_split_values_draws_for_each_rank_and_on_whole_ones_for_all():
    """Attention weights are split, the residual is not."""
    program = record(gpt2(), tokens(1, 511))
    lowered = lower(program, plan_sharding(program, 4))
    drawn = {
        node.module_path: isinstance(node.target, OwnRandomStream)
        for node in lowered.nodes
        if "bernoulli" in str(node.target) and ".h.1" in node.module_path
    }
    assert drawn == {
        "transformer.h.1.attn": True,
        "transformer.h.1.attn.resid_dropout": False,
        "transformer.h.1.mlp.dropout": False,
    }


def test_evaluation_without_dropout_holds_parameters_as_training_does():
    """The operators differ, what lies on the ranks does not."""
    module = gpt2()
    sharding = plan_module_sharding(module, tokens(1, 511), 4)
    assert sharding.evaluation is not None
    evaluated = record(module.eval(), tokens(1, 511))
    assert sharding.evaluation.parameters.items() <= sharding.parameters.items()
    split = lower(evaluated, sharding)
    assert any(isinstance(node.target, Conversion) for node in split.nodes)
    specs = {
        str(n.target): split.specs[n.outputs[0]].shape for _, n in split.nodes_of_kind(NodeKind.PARAMETER)
    }
    assert specs["transformer.h.1.attn.c_attn.weight"] == (1024, 768)


def test_a_divisible_sequence_is_split_between_the_products():
    """Norms and residuals on a part of the tokens: reduce-scatter and all-gather in place of all-reduce."""
    program = record(llama(), tokens(1, 512))
    found = conversions(program, plan_sharding(program, 2), "model.layers.1")
    scattered = found.pop("P -> S0", 0) + found.pop("P -> S1", 0)  # tokens: dim 0 of a product, 1 of its view
    assert scattered == 2
    assert found == {"S1 -> R~": 2}


def test_where_scattering_takes_as_long_as_a_whole_sum_values_are_summed_whole():
    """As over gloo: then the sequence is not split between the products."""
    program = record(llama(), tokens(1, 512))
    costs = ShardingCosts(2, scatter_passes=GLOO_SCATTER_PASSES)
    found = conversions(program, plan_sharding(program, 2, costs=costs), "model.layers.1")
    assert sum(count for name, count in found.items() if name.startswith("P -> R")) == 2
    assert not any(name.startswith("P -> S") or name.startswith("S") for name in found)


def test_the_fused_projection_of_gpt2_is_split_within_query_key_and_value():
    """Each of the three pieces is cut on its own, so that ranks hold whole heads."""
    program = record(gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), tokens(1, 511))
    sharding = plan_sharding(program, 4)
    assert sharding.parameters["transformer.h.1.attn.c_attn.weight"] == "S1[1024,1024,1024]"
    assert sharding.parameters["transformer.h.1.attn.c_attn.bias"] == "S0[1024,1024,1024]"
    assert sharding.parameters["transformer.h.1.attn.c_proj.weight"] == "S0"
    assert sharding.parameters["transformer.h.1.mlp.c_fc.weight"] == "S1"
    assert sharding.parameters["transformer.h.1.mlp.c_proj.weight"] == "S0"
    assert sharding.parameters["transformer.wte.weight"] == "S0"
    assert conversions(program, sharding, "transformer.h.1") == {"P -> R": 2, "R -> R~": 2}


def test_six_heads_over_four_ranks_are_split_two_two_one_one():
    """The widths of their projections are cut at heads, and the plan says so; a vocabulary of 50,257 too."""
    program = record(llama(num_attention_heads=6, num_key_value_heads=6, hidden_size=768), tokens(2, 511))
    costs = ShardingCosts(4, held_parameter_s_per_byte=1e-11)  # else it evens out what ranks hold
    layer = texts(plan_sharding(program, 4, costs=costs), "layers.1.self_attn")
    assert [layer.pop(f"model.layers.1.self_attn.{n}_proj.weight") for n in "qkvo"] == [
        *["S0[768]/6"] * 3,
        "S1[768]/6",
    ]
    tied = record(gpt2(vocab_size=50257), tokens(1, 511))
    assert plan_sharding(tied, 4).parameters["transformer.wte.weight"] == "S0[50257]"


def test_copies_of_a_block_share_one_decision_whatever_their_number():
    """Twelve layers take about as long as three, and every layer is split alike."""
    program = record(llama(num_hidden_layers=12), tokens(1, 511))
    plan_sharding(program, 2)  # the rules are known from here on
    start = time.process_time()
    sharding = plan_sharding(program, 2)
    assert time.process_time() - start < 15
    layers = [texts(sharding, f"layers.{index}.") for index in range(12)]
    assert all(list(layer.values()) == list(layers[0].values()) for layer in layers)


def held_bytes(program: Program, sharding: Sharding, degree: int) -> int:
    """Bytes of all parameters on the rank that holds most, four for each: gradient and two moments."""
    placements = parameter_placements(sharding)
    specs = {str(node.target): program.specs[node.outputs[0]] for node in parameters(program)}
    shapes = {
        name: local_shape(spec.shape, placements[name], degree) if name in placements else spec.shape
        for name, spec in specs.items()
    }
    return sum(4 * math.prod(shapes[name]) * spec.dtype.itemsize for name, spec in specs.items())


def parameters(program: Program):
    return [node for _, node in program.nodes_of_kind(NodeKind.PARAMETER)]


def test_a_memory_limit_is_kept():
    """Activations and half of the states: everything large is split; with a third, nothing is found."""
    program = record(GatedMlp(), torch.zeros(1, 8, 512))
    costs = ShardingCosts(2, held_parameter_s_per_byte=0.0, link_latency_s=1.0)  # it would rather not split
    whole = sum(program.specs[node.outputs[0]].num_bytes * 4 for node in parameters(program))
    sharding = plan_sharding(program, 2, costs=costs, memory_limit=MemoryLimit(whole * 0.55))
    assert held_bytes(program, sharding, 2) <= whole * 0.55
    with pytest.raises(LimitError, match="limits"):
        plan_sharding(program, 2, costs=costs, memory_limit=MemoryLimit(whole * 0.49))


def test_activations_that_do_not_fit_divide_the_sequence_inside_attention():
    """Two key heads over four ranks: a long sequence is cut into queries, where a limit asks for it.

    Whole, 28 times a hidden state is kept: the inputs and outputs of three norms and their products (9),
    query, key, value and output of attention (4), 4 of an MLP three times as wide, rotations and the loss. A
    quarter is 7, to which whole keys and values add 2, and what is gathered for the loss.
    """
    module = llama(
        num_hidden_layers=1, hidden_size=64, intermediate_size=192, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    program = record(module, tokens(1, 256))
    whole = ShardingOverrides({"*": "R"})
    costs = ShardingCosts(4, link_bytes_per_s=1e6)  # nothing is worth sending
    with pytest.raises(PlanError, match="worth splitting"):
        plan_sharding(program, 4, costs=costs, overrides=whole)
    states = 4 * sum(program.specs[node.outputs[0]].num_bytes for node in parameters(program))
    hidden = 256 * 64 * 4
    limit = MemoryLimit(states + 11 * hidden)
    sharding = plan_sharding(program, 4, costs=costs, memory_limit=limit, overrides=whole)
    kernels = {rule.kernel for rule in sharding.rules}
    assert "query_split_attention" in kernels


def test_a_model_without_a_size_that_divides_is_refused_with_the_reason():
    """Eight ranks cannot share seven of anything."""
    program = record(nn.Linear(7, 7), torch.zeros(7, 7))
    with pytest.raises(PlanError, match="no operator has a size of 8 or more that can be divided"):
        plan_sharding(program, 8)


def test_a_split_for_another_model_is_refused():
    """The plan names the operators it was made for."""
    sharding = plan_sharding(record(GatedMlp(), torch.zeros(1, 256, 512)), 2)
    with pytest.raises(PlanError, match="do not belong to this model"):
        lower(record(nn.Linear(512, 512), torch.zeros(1, 256, 512)), sharding)
