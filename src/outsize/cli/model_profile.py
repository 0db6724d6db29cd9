"""Finds the profile of a model argument: a preset by name, else a model recorded from its factory."""

from __future__ import annotations

from dataclasses import replace

from outsize.errors import ModelError
from outsize.model.config_sizes import is_config_path, read_config_sizes
from outsize.model.presets import find_preset, is_preset, preset_names
from outsize.model.profile import ModelProfile
from outsize.model.transformer_profile import transformer_profile
from outsize.strategies.base import ALL_LAYOUTS, RUNNABLE, Space

__all__ = ["find_profile"]


def find_profile(argument: str, *, sequence: int | None = None) -> tuple[ModelProfile, Space]:
    """Return the profile and the layouts that may be chosen for it.

    A preset, or the path of a ``config.json``, is planned from its sizes with everything that can be costed;
    a model that is recorded, with what the runtime executes. Only the latter imports torch.

    Raises:
        ModelError: neither a preset nor a model argument.
    """
    if is_preset(argument):
        profile = transformer_profile(find_preset(argument), sequence)
        return replace(profile, name=argument), ALL_LAYOUTS
    if is_config_path(argument):
        return transformer_profile(read_config_sizes(argument), sequence), ALL_LAYOUTS
    if ":" not in argument:
        raise ModelError(
            f"{argument!r} is neither a preset nor a model argument.",
            attempt=f"{argument}:function, for one that builds the model."
            if argument.endswith(".py")
            else "file.py:function, package.module:function, hf:<directory>, a config.json, or a preset: "
            + ", ".join(preset_names()),
        )
    from outsize.model.argument import load_model
    from outsize.model.profiling import profile_model

    return profile_model(load_model(argument, sequence=sequence)), RUNNABLE
