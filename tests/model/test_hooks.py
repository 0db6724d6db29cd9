"""Modules with hooks."""

from __future__ import annotations

import pytest

from model.tiny_models import llama
from outsize.errors import RecordingError
from outsize.model.record import record_module


def test_backward_hooks_are_refused_with_the_module_named() -> None:
    """Their module would let no gradient through, and no one would notice."""
    module, batch = llama()
    module.model.layers[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(RecordingError, match=r"module model\.layers\.1 has backward hooks"):
        record_module(module, batch)


def test_forward_hooks_on_blocks_have_a_warning() -> None:
    """A change they make would be made twice; hooks inside blocks run once and need no warning."""
    module, batch = llama()
    module.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not record_module(module, batch).warnings
    module.model.layers[1].register_forward_hook(lambda *_: None)
    (warning,) = record_module(module, batch).warnings
    assert "block model.layers.1 has forward hooks" in warning
