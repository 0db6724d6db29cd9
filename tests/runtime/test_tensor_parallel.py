"""Models whose operators are split, against one process, in float64: every gradient and five AdamW steps."""

import pickle

import pytest
from torch import nn

from coverage_families import FAMILIES, Family
from coverage_families.family import token_ids
from helpers.processes import run_distributed
from outsize.planner.sharding_overrides import ShardingOverrides
from split_training import MEMORY, TIME, WholeRun, run_whole, worst_difference

TOLERANCE = 1e-10
VOCABULARY = 32


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


def gpt2(**changes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**settings | without | changes))


def batch(num_tokens: int = 5):
    ids = token_ids(num_tokens, num_samples=2) % (VOCABULARY - 2)
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}


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
LONG = Family(
    "long", lambda: llama(num_key_value_heads=2, max_position_embeddings=64), lambda: batch(num_tokens=64)
)
# what costs time rather than memory, by degree
IN_TIME = {2: ["llama", "gpt2"], 4: ["llama_tied", "qwen3"]}
IN_MEMORY = {
    2: ["gpt2", "t5", "deberta", "resnet", "lstm", "dlrm", "qwen3_moe"],
    4: ["bert", "diffusion_unet"],
}


def family(name: str) -> Family:
    if name == "long":
        return LONG
    return Family(name, UNEVEN[name][0], batch) if name in UNEVEN else FAMILIES[name]


def check_rank(rank: int, pickled: bytes) -> dict[str, tuple[float, str]]:
    wholes: list[WholeRun] = pickle.loads(pickled)
    return {whole.name: worst_difference(rank, family(whole.name), whole) for whole in wholes}


def check_everywhere(wholes: list[WholeRun]) -> None:
    """Train every model on as many ranks as its split has, all in one launch."""
    pickled = pickle.dumps(wholes)  # as bytes: tensors would each be sent as an open file
    for found in run_distributed(check_rank, wholes[0].sharding.degree, pickled, timeout_s=110):
        assert {name: worst for name, worst in found.items() if worst[0] > TOLERANCE} == {}


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])
def test_models_split_to_hold_little_train_as_one_process_does(degree):
    """Encoders, decoders, experts, convolutions, recurrence and tables: all that divides."""
    check_everywhere([run_whole(FAMILIES[name], degree, MEMORY) for name in IN_MEMORY[degree]])


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])
def test_models_split_to_take_little_time_train_as_one_process_does(degree):
    """By heads, columns and rows, with grouped queries, tied embeddings and norms of single heads."""
    check_everywhere([run_whole(FAMILIES[name], degree, TIME) for name in IN_TIME[degree]])


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])
def test_sizes_that_do_not_divide_are_split_and_exact(degree):
    """Ranks hold more or less of what cannot be divided evenly, and nothing else changes."""
    wholes = []
    for name, (_, wanted, placements) in UNEVEN.items():
        if wanted == degree:
            wholes.append(run_whole(family(name), degree, TIME, ShardingOverrides(placements)))
            taken = set(wholes[-1].sharding.parameters.values())
            assert set(placements.values()) <= taken | {text.partition("[")[0] for text in taken}
    check_everywhere(wholes)


@pytest.mark.distributed
def test_a_long_sequence_is_divided_inside_attention():
    """Parameters whole, two key heads over four ranks: queries are split, keys and values gathered."""
    whole = run_whole(LONG, 4, TIME, ShardingOverrides({"*": "R"}))
    rules = [whole.sharding.rules[choice] for choice in whole.sharding.choices if choice >= 0]
    assert sum(rule.kernel == "query_split_attention" for rule in rules) == 2  # one a layer
    check_everywhere([whole])
