"""Lowered programs against one process, in float64."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.double_precision import in_double
from helpers.processes import run_distributed
from outsize.model.operator_rules.shards import shard_of
from outsize.model.program import Program
from outsize.model.record import record_module
from outsize.model.slice import slice_program
from outsize.model.stage_module import StageModule
from outsize.plan.sharding import Sharding
from outsize.planner.sharding import plan_sharding
from outsize.planner.sharding_costs import ShardingCosts
from outsize.planner.sharding_overrides import ShardingOverrides
from outsize.runtime.collectives import set_axis_group
from outsize.runtime.tensor_parallel import lower, parameter_placements

TOLERANCE = 1e-10
VOCABULARY = 32

# No latency: tiny models are split as large ones are. With "memory", holding a byte costs more than moving
# it, so that everything is split that can be; with "time" it hardly counts.
COSTS = {
    "memory": {"link_latency_s": 0.0, "held_activation_s_per_byte": 1e-9},
    "time": {"link_latency_s": 0.0, "held_parameter_s_per_byte": 1e-11, "flops_per_s": 1e12},
}


def llama(**changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=16,
    )
    return Qwen3ForCausalLM(config)


def gpt2(**changes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return GPT2LMHeadModel(GPT2Config(**settings | changes))


FAMILIES = {
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "llama_grouped_queries": lambda: llama(num_key_value_heads=2),
    "qwen3": qwen3,
    "gpt2": gpt2,
}
HEADS = {
    "*.q_proj.weight": "S0[24]/6", "*.k_proj.weight": "S0[24]/6", "*.v_proj.weight": "S0[24]/6",
    "*.o_proj.weight": "S1[24]/6",
}  # fmt: skip
# name -> model, degree, what the user decides
UNEVEN = {
    "six_heads": (lambda: llama(hidden_size=24, num_attention_heads=6, num_key_value_heads=6), 4, HEADS),
    "one_key_value_head": (lambda: llama(num_key_value_heads=1), 4, {"*.q_proj.weight": "S0"}),
    "two_key_value_heads": (lambda: llama(num_key_value_heads=2), 4, {"*.q_proj.weight": "S0"}),
    "odd_vocabulary": (lambda: llama(vocab_size=31, tie_word_embeddings=True), 4, {"*.embed*": "S0"}),
    "odd_middle": (lambda: llama(intermediate_size=23), 4, {"*.up_*": "S0", "*.down_*": "S1"}),
    "odd_width": (lambda: gpt2(n_embd=15, n_head=3), 2, {"*.wte.weight": "S1"}),
    "fused_three_heads": (lambda: gpt2(n_embd=24, n_head=3), 2, {"*.c_attn.*ight": "S1[24,24,24]/3"}),
}


def batch(vocabulary: int, num_tokens: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, vocabulary - 1, (2, num_tokens), generator=generator)
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}


@dataclass
class Whole:
    """A model in one process: the split to hold against it, losses, gradients, and what it trained to."""

    name: str
    num_tokens: int
    sharding: Sharding
    initial: dict[str, torch.Tensor]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]


def build(name: str, num_tokens: int) -> tuple[nn.Module, Program, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    factory = FAMILIES[name] if name in FAMILIES else UNEVEN[name][0]
    module = factory().to(torch.float64)
    entries = batch(module.config.vocab_size, num_tokens)
    return module, in_double(record_module(module, entries, granularity="operators")), entries


def whole(
    name: str, degree: int, costs: str, num_tokens: int = 6, overrides: ShardingOverrides | None = None
) -> Whole:
    module, program, entries = build(name, num_tokens)
    costs = ShardingCosts(degree, **COSTS[costs])
    sharding = plan_sharding(program, degree, costs=costs, overrides=overrides)
    initial = {n: p.detach().clone() for n, p in module.named_parameters()}
    losses, gradients = train(program, module, entries)
    trained = {n: p.detach() for n, p in module.named_parameters()}
    return Whole(name, num_tokens, sharding, initial, losses, gradients, trained)


def train(program: Program, module: nn.Module, entries) -> tuple[list[float], dict[str, torch.Tensor]]:
    stage = StageModule(program, slice_program(program, [])[0], module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    losses, first = [], {}
    for step in range(5):
        optimizer.zero_grad()
        loss = stage(**entries)["loss"]
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            first = {n: p.grad.clone() for n, p in module.named_parameters()}
        optimizer.step()
    return losses, first


def check_rank(rank: int, model: Whole) -> dict[str, torch.Tensor]:
    """Train one rank's part and compare everything it holds; return its replicated parameters."""
    degree = dist.get_world_size()
    set_axis_group("tp", dist.group.WORLD, seed=0)
    placements = parameter_placements(model.sharding)

    def held(name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = shard_of(tensor, placements[name], degree, rank) if name in placements else tensor
        return local.clone()  # what came from the parent is shared memory

    module, program, entries = build(model.name, model.num_tokens)
    for name, parameter in module.named_parameters():
        parameter.data = held(name, model.initial[name])
    losses, gradients = train(lower(program, model.sharding, rank=rank), module, entries)
    for name, parameter in module.named_parameters():
        for found, expected in ((gradients[name], model.gradients), (parameter.detach(), model.trained)):
            difference = (found - held(name, expected[name])).abs().max()
            assert difference < TOLERANCE, (
                f"{name} is off by {difference} ({placements.get(name, 'replicated')})"
            )
    torch.testing.assert_close(losses, model.losses, rtol=TOLERANCE, atol=TOLERANCE)
    return {n: p.detach() for n, p in module.named_parameters() if n not in placements}


def run_everywhere(model: Whole) -> None:
    replicated = run_distributed(check_rank, model.sharding.degree, model, timeout_s=90)
    for rank in replicated[1:]:
        assert all(torch.equal(rank[name], replicated[0][name]) for name in rank)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "degree", "costs"),
    [
        ("llama", 2, "memory"),
        ("llama", 4, "time"),
        ("llama_tied", 4, "memory"),
        ("llama_grouped_queries", 2, "time"),
        ("qwen3", 4, "memory"),
        ("gpt2", 2, "memory"),
        ("gpt2", 4, "time"),
    ],
)
def test_split_training_equals_one_process(family, degree, costs):
    """Every gradient and five AdamW steps agree, and replicated parameters stay bit-equal on all ranks."""
    run_everywhere(whole(family, degree, costs))


@pytest.mark.distributed
@pytest.mark.parametrize("name", UNEVEN)
def test_sizes_that_do_not_divide_are_split_and_exact(name):
    """Ranks hold more or less of what cannot be divided evenly, and nothing else changes."""
    _, degree, placements = UNEVEN[name]
    run_everywhere(whole(name, degree, "time", 5, ShardingOverrides(placements)))
