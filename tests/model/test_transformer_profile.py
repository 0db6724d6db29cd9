"""Profiles from published sizes: parameters, activation bytes and FLOPs against published figures."""

import pytest

from outsize.errors import ModelError
from outsize.model.presets import find_preset, is_preset, preset_names
from outsize.model.transformer_profile import TransformerConfig, spread_vocabulary, transformer_profile


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.1244),  # openai-community/gpt2: 124.4 M
        ("gpt2-xl", 1.5576),
        ("gpt3-175b", 174.6),  # Narayanan et al. 2021, table 1
        ("mt-nlg-530b", 529.6),
        ("megatron-1t", 1008.0),
        ("llama2-7b", 6.738),  # model cards
        ("llama2-70b", 68.98),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("mixtral-8x7b", 46.70),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.09),
        ("deepseek-v3", 671.0),
        ("t5-11b", 11.31),
        ("vit-22b", 21.74),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions) -> None:
    """Within 0.1%: what formulas leave out is small (biases, query norms)."""
    assert transformer_profile(find_preset(name)).num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_every_preset_makes_a_profile_that_can_be_cut() -> None:
    """All blocks after the first have a cut, and all figures are finite and positive."""
    for name in preset_names():
        blocks = transformer_profile(find_preset(name)).blocks
        assert all(block.cut_label for block in blocks[1:])
        assert all(block.saved_activation_bytes.per_sample > 0 for block in blocks)


def test_a_layer_keeps_the_bytes_of_korthikanti() -> None:
    """34 s h + 5 a s² bytes with dropout masks and unfused attention (arXiv 2205.05198, equation 2)."""
    config = TransformerConfig("t", 2, 1024, 16, 1000, 512, dropout=True, fused_attention=False)
    layer = transformer_profile(config).blocks[1]
    s, h, a = 512, 1024, 16
    assert layer.saved_activation_bytes.of(1) == pytest.approx(34 * s * h + 5 * a * s * s)
    assert layer.selective_saved_bytes is not None
    assert layer.selective_saved_bytes.of(1) == pytest.approx(34 * s * h)


def test_flops_are_those_of_narayanan() -> None:
    """72 B s L h² (1 + s / 6h + V / 12 L h), both ways, with full attention (arXiv 2104.04473)."""
    config = TransformerConfig("t", 4, 256, 8, 5000, 128, fused_attention=False)
    blocks = transformer_profile(config).blocks
    flops = sum(block.forward_flops.of(1) + block.backward_flops.of(1) for block in blocks)
    s, h, num_layers, vocab = 128, 256, 4, 5000
    assert flops == pytest.approx(
        72 * s * num_layers * h * h * (1 + s / (6 * h) + vocab / (12 * num_layers * h)), rel=1e-9
    )


def test_spreading_the_vocabulary_moves_parameters_and_flops_and_loses_none() -> None:
    """The same totals, with embedding and head empty (untied: both tables once)."""
    profile = transformer_profile(TransformerConfig("t", 8, 256, 8, 4096, 128))
    spread = spread_vocabulary(profile)
    assert spread.num_parameters == pytest.approx(profile.num_parameters, rel=1e-6)
    assert spread.blocks[0].num_parameters == spread.blocks[-1].num_parameters == 0


def test_an_unknown_preset_is_refused_with_near_names() -> None:
    """A typing mistake is answered with what was probably meant."""
    assert is_preset("Llama3-8B")
    assert not is_preset("file.py:build")
    with pytest.raises(ModelError, match="llama3-8b"):
        find_preset("lama3-8b")
