"""Models of Hugging Face transformers, built from a configuration on disk alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from outsize.errors import ModelError
from outsize.model.config_file import read_config_file
from outsize.model.source import ModelSource

__all__ = ["DEFAULT_SEQUENCE", "load_hugging_face"]

DEFAULT_SEQUENCE = 2048  # tokens in a sample, where the model takes as many
DEFAULT_IMAGE_SIZE = 224  # pixels a side, where the configuration gives none

_WORD_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration")
_CLASS_LABELS = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")


def load_hugging_face(location: str, *, sequence: int | None = None) -> ModelSource:
    """Return the model described by a directory's ``config.json`` or by such a file; weights are not read.

    Raises:
        ModelError: the file is missing or unreadable, or names no class that transformers has.
    """
    path, settings = read_config_file(location)
    transformers = _import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"transformers cannot read {path}: {str(error).strip().splitlines()[0]}",
            why=f"model_type is {settings.get('model_type', 'missing')!r}",
            attempt=f"use a configuration that transformers {transformers.__version__} knows",
        ) from error
    names = settings.get("architectures") or []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise ModelError(
            f"{path} names no model class that transformers {transformers.__version__} has",
            why=f"its architectures are {names}",
            attempt='add for example "architectures": ["LlamaForCausalLM"]',
        )
    for part in (config, *_parts(config)):
        if hasattr(part, "use_cache"):  # a cache is for generating text, not for training
            part.use_cache = False
    return ModelSource(
        f"hf:{location}",
        lambda: model_class(config),
        lambda num_samples: _sample_batch(model_class, config, num_samples, sequence),
    )


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "hf: models need the package transformers", attempt="pip install 'outsize[hf]'"
        ) from error
    return transformers


def _parts(config: Any) -> list[Any]:
    return [getattr(config, name) for name in getattr(config, "sub_configs", {}) if hasattr(config, name)]


def _sample_batch(model_class: Any, config: Any, num_samples: int, sequence: int | None) -> dict[str, Any]:
    """Return random inputs of the model's kind; the same on every call."""
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config()
    accepted = inspect.signature(model_class.forward).parameters
    batch = _main_input(model_class, config, num_samples, sequence, generator)
    if "return_loss" in accepted and "input_ids" in accepted:  # contrastive models take both kinds
        batch["input_ids"] = _tokens(text, num_samples, sequence, generator)
        batch["return_loss"] = True
    elif "labels" in accepted and model_class.__name__.endswith(_CLASS_LABELS):
        batch["labels"] = torch.randint(config.num_labels, (num_samples,), generator=generator)
    elif "labels" in accepted and "input_ids" in batch and model_class.__name__.endswith(_WORD_LABELS):
        batch["labels"] = batch["input_ids"].clone()
    elif "labels" in accepted and model_class.__name__.endswith((*_WORD_LABELS, "ForCTC")):
        batch["labels"] = _tokens(text, num_samples, sequence or 32, generator)
    return batch


def _main_input(
    model_class: Any, config: Any, num_samples: int, sequence: int | None, generator: torch.Generator
) -> dict[str, Any]:
    name = model_class.main_input_name
    shape: tuple[int, ...]
    if name == "input_ids":
        return {name: _tokens(config.get_text_config(), num_samples, sequence, generator)}
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", DEFAULT_IMAGE_SIZE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (num_samples, getattr(vision, "num_channels", 3), height, width)
    elif name == "input_features" and hasattr(config, "max_source_positions"):
        shape = (num_samples, config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "input_values":
        shape = (num_samples, sequence or 16_000)
    else:
        raise ModelError(
            f"no sample batch is known for {model_class.__name__}, which takes {name}",
            attempt="write a file with a function that builds the model and a function batch(num_samples)",
        )
    return {name: torch.randn(shape, generator=generator)}


def _tokens(config: Any, num_samples: int, sequence: int | None, generator: torch.Generator) -> torch.Tensor:
    longest = next(
        (
            int(value)
            for key in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
            if isinstance(value := getattr(config, key, None), int) and value > 0
        ),
        None,
    )
    if sequence is not None and longest is not None and sequence > longest:
        raise ModelError(
            f"a sequence of {sequence} is longer than the model's {longest} positions",
            attempt=f"ask for {longest} or fewer",
        )
    length = sequence or min(longest or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)
    return torch.randint(config.vocab_size, (num_samples, length), generator=generator)
