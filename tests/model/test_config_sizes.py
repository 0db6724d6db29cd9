"""Sizes from a ``config.json``: the same as the preset's, and errors a user can act on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outsize.errors import ModelError
from outsize.model.config_sizes import is_config_path, read_config_sizes
from outsize.model.hugging_face import load_hugging_face
from outsize.model.presets import find_preset
from outsize.model.transformer_profile import transformer_profile

# meta-llama/Meta-Llama-3-8B, the fields that matter.
_LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def _write(folder: Path, settings: dict) -> str:
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def test_a_configuration_plans_as_the_preset_of_the_same_sizes(tmp_path) -> None:
    """Llama-3 8B: 8.03 billion parameters, block for block as the preset."""
    location = _write(tmp_path, _LLAMA)
    assert is_config_path(location)
    assert is_config_path(str(tmp_path / "config.json"))
    profile = transformer_profile(read_config_sizes(location))
    preset = transformer_profile(find_preset("llama3-8b"))
    assert profile.num_parameters == preset.num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert profile.blocks[1].forward_flops == preset.blocks[1].forward_flops


def test_gpt2_names_its_sizes_differently_and_ties_unless_told(tmp_path) -> None:
    """GPT-2 small has 124.4 million parameters with tied embeddings."""
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    config = read_config_sizes(_write(tmp_path, gpt2))
    assert config.is_tied
    assert transformer_profile(config).num_parameters == pytest.approx(124.4e6, rel=2e-3)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "mamba"}, "hf:"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "many"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ],
)
def test_what_is_missing_is_named(tmp_path, change, part) -> None:
    """An unknown kind of model points to recording it."""
    with pytest.raises(ModelError, match=part):
        read_config_sizes(_write(tmp_path, {**_LLAMA, **change}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "no readable JSON"),
        (b"", "no readable JSON"),
        (b"\xff\xfe", "no readable JSON"),
        (b"[1]", "holds no JSON object"),
        (None, "nothing is downloaded"),
    ],
)
def test_a_broken_file_is_one_message(tmp_path, content: bytes | None, message: str) -> None:
    """Not a traceback, and the same for sizes alone as for a model that is built."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    for read in (read_config_sizes, load_hugging_face):
        with pytest.raises(ModelError, match=message):
            read(str(tmp_path))


def test_planning_a_configuration_imports_no_torch(tmp_path) -> None:
    """Nor does planning a preset: seconds of start-up that nobody waits for."""
    location = _write(tmp_path, _LLAMA)
    program = (
        "import sys\n"
        "from outsize.cli.model_profile import find_profile\n"
        "from outsize.cluster.argument import parse_cluster\n"
        "from outsize.planner.search import plan_job\n"
        f"profile, space = find_profile({location!r})\n"
        "plan_job(profile, parse_cluster('8xH100'), global_batch=8, precision='bf16', space=space)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
