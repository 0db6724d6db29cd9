"""The model argument: ``file.py:function``, ``package.module:function`` or ``hf:<directory or file>``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from outsize.errors import ModelError
from outsize.model.presets import is_preset
from outsize.model.source import ModelSource

__all__ = ["load_function", "load_model"]

_FORMS = "file.py:function, package.module:function, or hf:<directory or config.json>"


def load_model(argument: str, *, sequence: int | None = None) -> ModelSource:
    """Find the model that ``argument`` names; nothing is built yet and nothing is ever downloaded.

    A function returns an ``nn.Module`` or ``(module, sample_batch)`` and takes no arguments. Beside it, a
    function ``batch(num_samples)`` may return sample batches; if it takes ``sequence`` too, the length asked
    for is passed on. A Hugging Face model is built from its configuration alone, with new values.

    Raises:
        ModelError: the argument is malformed, or what it names is missing or cannot be imported.
    """
    if argument.startswith("hf:"):
        from outsize.model.hugging_face import load_hugging_face

        return load_hugging_face(argument.removeprefix("hf:"), sequence=sequence)
    module, location, name = _load_module(argument, "model")
    build = _find_factory(module, location, name)
    make_batch = getattr(module, "batch", None) if name != "batch" else None
    if not callable(make_batch):
        return ModelSource(argument, build)
    return ModelSource(argument, build, _with_sequence(make_batch, sequence, location))


def load_function(argument: str) -> Callable[..., Any]:
    """Return the function that ``file.py:function`` or ``package.module:function`` names.

    Raises:
        ModelError: the argument is malformed, or what it names is missing or cannot be imported.
    """
    module, location, name = _load_module(argument, "function")
    return _find_function(module, location, name)


def _load_module(argument: str, what: str) -> tuple[ModuleType, str, str]:
    """Import what is before the colon; return it with both halves of the argument."""
    location, _, name = argument.rpartition(":")
    if not location or not name:
        whole = argument.removesuffix(":")
        raise ModelError(
            f"{argument!r} is not a {what} argument",
            why="presets have sizes alone, no forward that could be recorded"
            if is_preset(argument)
            else "it names no function",
            attempt=f"{whole}:function" if whole.endswith(".py") else _FORMS,
        )
    module = _load_file(Path(location)) if location.endswith(".py") else _import_module(location)
    return module, location, name


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"there is no file {path}", why=f"looked in {Path.cwd()}", attempt="check the path")
    path = path.resolve()
    name = f"outsize_model_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if str(path.parent) not in sys.path:  # so that the file finds its neighbours
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(str(path), error) from error
    return module


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ModelError(
                f"there is no module {name}",
                why=f"{error.name} is neither installed nor in {Path.cwd()}",
                attempt=f"install it, run from its folder, or give {_FORMS}",
            ) from error
        raise _import_failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(location: str, error: Exception | SystemExit) -> ModelError:
    if isinstance(error, SyntaxError):
        place = f"at {error.filename}:{error.lineno}" if error.filename else "it is no Python"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"at {frame.filename}:{frame.lineno}"
    attempt = "import it in Python by itself and repair it there"
    if isinstance(error, SystemExit):  # such as a training script that reads its own arguments
        attempt = 'put what ends the program below `if __name__ == "__main__":`'
    return ModelError(
        f"{location} cannot be imported: {type(error).__name__}: {error}", why=place, attempt=attempt
    )


def _find_function(module: ModuleType, location: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        names = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        raise ModelError(
            f"{location} has no function {name}",
            why=f"its functions are {', '.join(names)}" if names else "it defines no function",
            attempt=_FORMS,
        )
    if isinstance(function, nn.Module) or not callable(function):
        raise ModelError(
            f"{location}:{name} is no function but {type(function).__name__}",
            attempt="name a function, which is called when it is needed",
        )
    return function  # type: ignore[no-any-return]


def _find_factory(module: ModuleType, location: str, name: str) -> Callable[[], Any]:
    function = _find_function(module, location, name)
    required = _required_parameters(function)
    if required:
        raise ModelError(
            f"{location}:{name} needs arguments: {', '.join(required)}",
            why="a model factory is called without arguments",
            attempt="write a function that takes none and calls this one",
        )
    return function


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in callables that tell nothing of themselves
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _with_sequence(
    make_batch: Callable[..., Any], sequence: int | None, location: str
) -> Callable[[int], Any]:
    if sequence is None:
        return make_batch
    if "sequence" not in inspect.signature(make_batch).parameters:
        raise ModelError(
            f"a sequence of {sequence} was asked for, but {location}:batch does not take `sequence`",
            attempt="add the parameter `sequence` to it, or leave the option away",
        )
    return functools.partial(make_batch, sequence=sequence)
