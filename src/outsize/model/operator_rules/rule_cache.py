"""Keeps discovered rules on disk, since trials take seconds and give the same answer every time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from outsize.model.operator_rules.placement import parse_placement
from outsize.model.operator_rules.rule import OperatorRule

__all__ = ["RuleCache", "cache_folder"]

Rules = tuple[OperatorRule, ...]


def cache_folder() -> Path:
    """Return where outsize keeps what it can compute again: ``$OUTSIZE_CACHE``, or the user's cache."""
    if "OUTSIZE_CACHE" in os.environ:
        return Path(os.environ["OUTSIZE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "outsize"


class RuleCache:
    """Rules by operator signature for one degree; another torch or other rule code starts afresh."""

    def __init__(self, degree: int, segments: Sequence[Sequence[int]]) -> None:
        name = f"{torch.__version__}-{_version_of_this_code()}-{degree}-{list(map(list, segments))}"
        key = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._path = cache_folder() / "operator_rules" / f"{key}.json"
        self._found: dict[str, Rules] = self._load()

    def get(self, signature_key: str) -> Rules | None:
        """Return the rules found earlier, or None."""
        return self._found.get(signature_key)

    def add(self, found: Mapping[str, Rules]) -> None:
        """Remember rules, on disk too where that can be written."""
        self._found.update(found)
        plain = {key: [_to_plain(rule) for rule in rules] for key, rules in self._found.items()}
        with contextlib.suppress(OSError):  # a read-only home costs time, not results
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}.partial")
            temporary.write_text(json.dumps(plain), encoding="utf-8")
            temporary.replace(self._path)

    def _load(self) -> dict[str, Rules]:
        try:
            plain = json.loads(self._path.read_text(encoding="utf-8"))
            return {key: tuple(map(_from_plain, rules)) for key, rules in plain.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}  # none yet, or damaged: the rules are found again


def _to_plain(rule: OperatorRule) -> dict[str, object]:
    return {
        "inputs": [str(placement) for placement in rule.inputs],
        "outputs": [str(placement) for placement in rule.outputs],
        "local_arguments": rule.local_arguments,
        "kernel": rule.kernel,
        "only_even": rule.only_even,
    }


def _from_plain(values: Mapping[str, object]) -> OperatorRule:
    inputs, outputs, local, kernel = (
        values[name] for name in ("inputs", "outputs", "local_arguments", "kernel")
    )
    assert isinstance(inputs, list)
    assert isinstance(outputs, list)
    assert isinstance(local, list)
    return OperatorRule(
        inputs=tuple(map(parse_placement, inputs)),
        outputs=tuple(map(parse_placement, outputs)),
        local_arguments=tuple(local),
        kernel=str(kernel),
        only_even=bool(values["only_even"]),
    )


@functools.cache
def _version_of_this_code() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
