"""The model argument: every form that works, and one clear message for every one that does not."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from outsize.errors import ModelError
from outsize.jobs.default_model import SEQUENCE
from outsize.model.argument import load_model
from outsize.model.source import resize_batch

FILE = """
import torch
from torch import nn

def build():
    return nn.Linear(3, 2)

def build_with_batch():
    return nn.Linear(3, 2), (torch.ones(4, 3),)

def build_wide(width):
    return nn.Linear(width, 2)

def fails():
    raise ValueError("no such width")

def returns_text():
    return "model"

NUMBER = 3
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(FILE)
    return path


def message_of(argument: str, **options: int) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(argument, **options).factory()
    return str(caught.value)


def test_function_in_a_file_builds_the_module(model_file: Path) -> None:
    """`file.py:function` calls the function of that file."""
    source = load_model(f"{model_file}:build")
    assert isinstance(source.factory(), nn.Linear)
    assert source.name == f"{model_file}:build"


def test_function_in_a_package_builds_the_module() -> None:
    """`package.module:function` imports the module; its `batch` gives sample batches."""
    source = load_model("outsize.jobs.default_model:build")
    assert source.sample_batch(3)["input_ids"].shape == (3, SEQUENCE)


def test_batch_returned_beside_the_module_is_resized(model_file: Path) -> None:
    """A factory may return (module, sample_batch); the batch is brought to any number of samples."""
    source = load_model(f"{model_file}:build_with_batch")
    assert isinstance(source.factory(), nn.Linear)
    assert source.sample_batch(6)[0].shape == (6, 3)


def test_function_batch_beside_the_factory_gives_sample_batches(tmp_path: Path) -> None:
    """A second function batch(num_samples) in the file is used, with the sequence where it takes one."""
    path = tmp_path / "with_batch.py"
    path.write_text(
        FILE + "\ndef batch(num_samples, sequence=5):\n    return torch.zeros(num_samples, sequence)\n"
    )
    assert load_model(f"{path}:build").sample_batch(2).shape == (2, 5)
    assert load_model(f"{path}:build", sequence=7).sample_batch(2).shape == (2, 7)


def test_rows_of_a_batch_repeat_in_turn() -> None:
    """Row i of a grown batch is row i modulo the old number of rows; scalars and non-tensors stay."""
    grown = resize_batch({"x": torch.tensor([1, 2]), "flag": True, "t": torch.tensor(5)}, 5)
    assert grown["x"].tolist() == [1, 2, 1, 2, 1]
    assert grown["flag"] is True
    assert grown["t"].item() == 5


def test_each_mistake_has_its_own_message(model_file: Path, tmp_path: Path) -> None:
    """What is missing or wrong is named, with what there is instead."""
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ndef (:\n")
    raising = tmp_path / "raising.py"
    raising.write_text("\nimport nothing_of_this_name\n")
    expected = {
        "nonsense": "is not a model argument",
        f"{tmp_path}/absent.py:build": "there is no file",
        "no_such_package.models:build": "there is no module no_such_package",
        f"{model_file}:biuld": "its functions are build, build_with_batch",
        f"{model_file}:NUMBER": "is no function but int",
        f"{model_file}:build_wide": "needs arguments: width",
        f"{model_file}:returns_text": "returned an object of type str, not a module",
        f"{broken}:build": f"{broken}:2",
        f"{raising}:build": f"{raising}:2",
        f"hf:{tmp_path}/absent": "nothing is downloaded",
    }
    for argument, part in expected.items():
        assert part in message_of(argument)


def test_factory_that_raises_is_named_with_message_and_line(model_file: Path) -> None:
    """An exception of the user's function ends up in one message with its place."""
    message = message_of(f"{model_file}:fails")
    assert "raised ValueError: no such width" in message
    assert f"{model_file}:15" in message


def test_factory_without_sample_batch_says_how_to_add_one(model_file: Path) -> None:
    """Recording needs a batch; the message names the function to write."""
    with pytest.raises(ModelError, match=r"batch\(num_samples\)"):
        load_model(f"{model_file}:build").sample_batch(2)


def write_config(folder: Path, **settings: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
}


def test_language_model_is_built_from_its_configuration(tmp_path: Path) -> None:
    """`hf:` takes a directory or its config.json; language models get token ids and labels."""
    path = write_config(tmp_path, **LLAMA)
    for location in (tmp_path, path):
        source = load_model(f"hf:{location}")
        batch = source.sample_batch(3)
        assert batch["input_ids"].shape == batch["labels"].shape == (3, 12)
        assert source.factory()(**batch).loss.isfinite()


def test_image_classifier_gets_images_and_classes(tmp_path: Path) -> None:
    """The sample batch follows the model's kind."""
    write_config(
        tmp_path,
        model_type="vit",
        architectures=["ViTForImageClassification"],
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    source = load_model(f"hf:{tmp_path}")
    assert source.factory()(**source.sample_batch(2)).loss.isfinite()


def test_unreadable_configurations_are_refused(tmp_path: Path) -> None:
    """Broken JSON, unknown model types, missing classes and too long sequences each have a message."""
    path = tmp_path / "config.json"
    path.write_text("{")
    assert "no readable JSON" in message_of(f"hf:{path}")
    path.write_text("[]")
    assert "holds no JSON object" in message_of(f"hf:{path}")
    write_config(tmp_path, model_type="no_such_type", architectures=["LlamaForCausalLM"])
    assert "no_such_type" in message_of(f"hf:{path}")
    write_config(tmp_path, **{**LLAMA, "architectures": ["NoSuchModel"]})
    assert "names no model class" in message_of(f"hf:{path}")
    write_config(tmp_path, **LLAMA)
    with pytest.raises(ModelError, match="longer than the model's 12 positions"):
        load_model(f"hf:{path}", sequence=13).sample_batch(1)


def test_entries_that_samples_share_are_seen_from_a_batch_with_one_more(tmp_path: Path) -> None:
    """A table that by chance has as many rows as there are samples does not grow with them."""
    path = tmp_path / "with_table.py"
    path.write_text(
        FILE
        + "\ndef batch(num_samples):\n"
        + "    return {'x': torch.zeros(num_samples, 3), 'table': torch.zeros(4, 3)}\n"
    )
    source = load_model(f"{path}:build")
    assert source.shared_entries(source.sample_batch(4)) == {"table"}
    assert source.shared_entries(source.sample_batch(2)) == frozenset()
