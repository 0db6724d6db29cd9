"""The default job's text."""

from __future__ import annotations

import pytest
import torch

from outsize.jobs.standard_library_text import load_split, sample_windows, source_files


def test_no_file_is_in_both_splits() -> None:
    """Training and validation text come from different files, and both exist."""
    train, validation = set(source_files("train")), set(source_files("validation"))
    assert train
    assert validation
    assert not train & validation


def test_windows_are_the_text_itself() -> None:
    """A window is a run of bytes that occurs in the split."""
    window = sample_windows("validation", num_samples=1, sequence=64, step=3)[0]
    text = bytes(load_split("validation").tolist())
    assert bytes(window.tolist()) in text


def test_windows_depend_on_the_step_only() -> None:
    """Any process that asks for a step gets the same windows; another step gives others."""
    first = sample_windows("train", num_samples=4, sequence=32, step=7)
    assert torch.equal(first, sample_windows("train", num_samples=4, sequence=32, step=7))
    assert not torch.equal(first, sample_windows("train", num_samples=4, sequence=32, step=8))


def test_an_unknown_split_is_refused() -> None:
    """A misspelt split is an error, not an empty data set."""
    with pytest.raises(ValueError, match="'train' or 'validation'"):
        source_files("test")
