"""Causal language models of transformers, built from tiny configurations."""

from __future__ import annotations

from typing import Any

from coverage_families.family import VOCABULARY, Family, token_ids

__all__ = ["CAUSAL_FAMILIES"]

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}
_LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip

# name -> class prefix, changes to the common settings, class suffix
_SPECIFICATIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "ForCausalLM"),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}, "ForCausalLM"),
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "LMHeadModel"),
    "gpt_neox": ("GPTNeoX", {"hidden_dropout": 0.0}, "ForCausalLM"),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}, "ForCausalLM"),
    "qwen2": ("Qwen2", {}, "ForCausalLM"),
    "qwen3": ("Qwen3", {"head_dim": 8}, "ForCausalLM"),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 6}, "ForCausalLM"),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 6}, "Gemma3ForCausalLM"),
    "phi": ("Phi", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, "ForCausalLM"),
    "mistral": ("Mistral", {"sliding_window": 6}, "ForCausalLM"),
    "falcon": ("Falcon", {"alibi": False, "num_kv_heads": 2}, "ForCausalLM"),
    "bloom": ("Bloom", {"n_layer": 4, "n_head": 4}, "ForCausalLM"),
    "mamba": ("Mamba", {"state_size": 8}, "ForCausalLM"),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "experts": "eager", **_EXPERTS}, "ForCausalLM"),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "head_dim": 8, **_EXPERTS}, "ForCausalLM"),
    "deepseek_v3": ("DeepseekV3", _LATENT, "ForCausalLM"),
}


def _family(name: str) -> Family:
    prefix, changes, suffix = _SPECIFICATIONS[name]

    def factory() -> Any:
        import transformers

        settings = {**_COMMON, **changes}
        # the grouped product that is used by default has no float64 on CPUs
        experts = settings.pop("experts", "batched_mm")
        config = getattr(transformers, f"{prefix}Config")(**settings)
        config._experts_implementation = experts
        model_class = suffix if suffix.endswith("Gemma3ForCausalLM") else f"{prefix}{suffix}"
        return getattr(transformers, model_class)(config)

    return Family(name, factory, lambda: {"input_ids": token_ids(), "labels": token_ids(seed=1)})


CAUSAL_FAMILIES = {name: _family(name) for name in _SPECIFICATIONS}
