"""The device that a process was told to use, tried before anything is built."""

from __future__ import annotations

import torch

from outsize.errors import LaunchError

__all__ = ["find_device"]


def find_device(device: torch.device | str) -> torch.device:
    """Return the device of that name.

    Raises:
        LaunchError: there is no such device here.
    """
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).sum().item()  # fails on `meta` too, which has no values
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise LaunchError(
            f"The device {str(device)!r} cannot be used here.",
            why=str(error).strip().splitlines()[0],
            attempt=", ".join(_usable_devices()),
        ) from None
    return found


def _usable_devices() -> list[str]:
    names = ["cpu"]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        names += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return names
