"""Encoders, encoder-decoders, vision, audio and contrastive models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from coverage_families.family import VOCABULARY, Family, noise, token_ids

__all__ = ["PRETRAINED_FAMILIES"]

_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
_TWO_SIDES = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_decoder_layers": 4,
    "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_WHISPER = {
    **_TWO_SIDES, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32,
    "decoder_start_token_id": 1, "begin_suppress_tokens": None, "suppress_tokens": None,
}  # fmt: skip
_WAVES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
    "activation_dropout": 0.0, "final_dropout": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False,
}  # fmt: skip
_CLIP_SIDE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_CLIP = {
    "text_config": {**_CLIP_SIDE, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2},
    "vision_config": {**_CLIP_SIDE, "image_size": 16, "patch_size": 4},
    "projection_dim": 16,
}
_DEBERTA = {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
}


def _masked_words() -> dict[str, torch.Tensor]:
    mask = torch.ones(4, 10, dtype=torch.long)
    mask[1, 7:] = 0
    mask[3, 4:] = 0
    return {"input_ids": token_ids(), "attention_mask": mask, "labels": token_ids(seed=1)}


def _images(size: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": noise(4, 3, size, size), "labels": torch.tensor([0, 1, 2, 3])}


def _translation() -> dict[str, torch.Tensor]:
    return {"input_ids": token_ids(), "labels": token_ids(7, seed=1)}


# name -> configuration class, its settings, model class, batch
_SPECIFICATIONS: dict[str, tuple[str, dict[str, Any], str, Callable[[], Any]]] = {
    "bert": ("BertConfig", _ENCODER, "BertForMaskedLM", _masked_words),
    "roberta": ("RobertaConfig", _ENCODER, "RobertaForMaskedLM", _masked_words),
    "deberta": ("DebertaV2Config", _DEBERTA, "DebertaV2ForMaskedLM", _masked_words),
    "t5": ("T5Config", _T5, "T5ForConditionalGeneration", _translation),
    "bart": (
        "BartConfig",
        {**_TWO_SIDES, "max_position_embeddings": 64},
        "BartForConditionalGeneration",
        _translation,
    ),
    "vit": (
        "ViTConfig",
        {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5},
        "ViTForImageClassification",
        _images(16),
    ),
    "swin": (
        "SwinConfig",
        {**_SWIN, "window_size": 4, "num_labels": 5, "drop_path_rate": 0.0},
        "SwinForImageClassification",
        _images(32),
    ),
    "convnext": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "num_labels": 5, "drop_path_rate": 0.0},
        "ConvNextForImageClassification",
        _images(32),
    ),
    "resnet": ("ResNetConfig", {**_RESNET, "num_labels": 5}, "ResNetForImageClassification", _images(32)),
    "whisper": (
        "WhisperConfig",
        _WHISPER,
        "WhisperForConditionalGeneration",
        lambda: {"input_features": noise(4, 8, 24), "labels": token_ids(7, seed=1)},
    ),
    "wav2vec2": (
        "Wav2Vec2Config",
        _WAVES,
        "Wav2Vec2ForCTC",
        lambda: {"input_values": noise(4, 400), "labels": token_ids(4, seed=1)},
    ),
    "clip": (
        "CLIPConfig",
        _CLIP,
        "CLIPModel",
        lambda: {"input_ids": token_ids(), "pixel_values": noise(4, 3, 16, 16), "return_loss": True},
    ),
}


def _family(name: str) -> Family:
    config_class, settings, model_class, make_batch = _SPECIFICATIONS[name]

    def factory() -> Any:
        import transformers

        return getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))

    return Family(name, factory, make_batch)


PRETRAINED_FAMILIES = {name: _family(name) for name in _SPECIFICATIONS}
