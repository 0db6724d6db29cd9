"""Sizes of a transformer from a Hugging Face ``config.json``, without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outsize.errors import ModelError
from outsize.model.config_file import read_config_file
from outsize.model.transformer_profile import TransformerConfig

__all__ = ["KNOWN_MODEL_TYPES", "is_config_path", "read_config_sizes"]

_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2")
_EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe")
_LEARNED_POSITIONS = ("gpt2", "opt", "bert", "roberta")
_PLAIN = (*_LEARNED_POSITIONS, "gpt_neox", "gpt_bigcode")
KNOWN_MODEL_TYPES = tuple(sorted((*_GATED, *_EXPERTS, *_PLAIN)))
# Field of TransformerConfig: the names that configurations use for it.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions", "n_ctx"),
    "ffn_hidden": ("intermediate_size", "n_inner", "ffn_dim"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "num_experts": ("num_local_experts", "num_experts"),
    "num_active_experts": ("num_experts_per_tok",),
    "expert_hidden": ("moe_intermediate_size",),
}
_NEEDED = ("num_layers", "hidden", "num_heads", "vocab", "sequence")


def is_config_path(argument: str) -> bool:
    """Whether ``argument`` is a ``.json`` file or a folder with a ``config.json``."""
    path = Path(argument)
    return (path.suffix == ".json" and path.is_file()) or (path / "config.json").is_file()


def read_config_sizes(location: str) -> TransformerConfig:
    """Return the sizes that the configuration at ``location`` (a file or its folder) states.

    Raises:
        ModelError: not JSON, a kind of model whose formulas are not known here, or a size is missing.
    """
    path, settings = read_config_file(location)
    kind = settings.get("model_type")
    if kind not in KNOWN_MODEL_TYPES:
        raise ModelError(
            f"{path} describes a {kind or 'nameless'} model, whose formulas are not known.",
            why="known are " + ", ".join(KNOWN_MODEL_TYPES),
            attempt=f"hf:{location}, which records the model itself",
        )
    return _config(kind, settings, path)


def _config(kind: str, settings: Mapping[str, Any], path: Path) -> TransformerConfig:
    sizes: dict[str, Any] = {}
    for field, names in _NAMES.items():
        value = next((settings[name] for name in names if settings.get(name) is not None), None)
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if is_size:
            sizes[field] = value
        elif field in _NEEDED or isinstance(value, int):
            raise ModelError(
                f"{path} states no usable {' or '.join(names)}.",
                why=f"it holds {value!r}, and a size is a whole number above 0",
                attempt="the config.json that came with the model",
            )
    if kind not in _EXPERTS:
        sizes = {name: value for name, value in sizes.items() if "expert" not in name}
    usual = kind in {
        "gpt2",
        "gemma",
        "opt",
        "bert",
        "roberta",
        "gpt_bigcode",
    }  # ties unless it says otherwise
    return TransformerConfig(
        name=str(settings.get("_name_or_path") or kind),
        is_gated=kind not in _PLAIN,
        is_causal=kind not in {"bert", "roberta"},
        is_tied=bool(settings.get("tie_word_embeddings", usual)),
        learned_positions=kind in _LEARNED_POSITIONS,
        **sizes,
    )
