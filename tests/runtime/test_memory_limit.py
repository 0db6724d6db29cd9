"""Emulated device memory is really limited, and running out of it reads well."""

from __future__ import annotations

import pytest
import torch

from helpers.processes import run_distributed
from outsize.errors import DoesNotFitError
from outsize.runtime.measured_memory import MemoryMeter
from outsize.runtime.memory_limit import apply_memory_limit, readable_out_of_memory
from outsize.runtime.process_memory import apply_steady_allocation, is_supported
from outsize.runtime.warm_up import warm_up

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux's /proc")
MIB = 2**20


def _allocate_until_refused(_rank: int, limit_bytes: int, tensor_bytes: int) -> tuple[int, str]:
    apply_steady_allocation()
    apply_memory_limit(limit_bytes)
    held = []
    message = ""
    try:
        with readable_out_of_memory(3, limit_bytes, "filling up"):
            while len(held) * tensor_bytes < 2 * limit_bytes:
                held.append(torch.ones(tensor_bytes, dtype=torch.uint8))
    except DoesNotFitError as error:
        message = str(error)
    return len(held) * tensor_bytes, message


def _peak_of(_rank: int, num_bytes: int) -> tuple[int, int, int]:
    apply_steady_allocation()
    warm_up(torch.device("cpu"))
    meter = MemoryMeter(torch.device("cpu"))
    first = torch.ones(num_bytes, dtype=torch.uint8)
    del first
    peak = meter.measure_peak_bytes()
    allocated = meter.measure_allocated_bytes()
    meter.reset_peak()
    return peak or 0, allocated or 0, meter.measure_peak_bytes() or 0


@pytest.mark.parametrize("tensor_bytes", [16 * MIB, 100 * 1024])
def test_a_device_holds_what_it_says_within_four_percent(tensor_bytes: int) -> None:
    """256 MiB of large or small tensors fit, to 4%, then DoesNotFitError comes."""
    held, message = run_distributed(_allocate_until_refused, 1, 256 * MIB, tensor_bytes, process_group=False)[
        0
    ]
    assert "Device 3 ran out of memory while filling up" in message
    assert "The device holds 256 MiB" in message
    assert held == pytest.approx(256 * MIB, rel=0.04 if tensor_bytes < MIB else 0.0625)


def test_the_peak_is_measured_to_the_mebibyte_and_can_be_reset() -> None:
    """64 MiB held once give a peak of 64 MiB, and nothing after the reset."""
    peak, allocated, after_reset = run_distributed(_peak_of, 1, 64 * MIB, process_group=False)[0]
    assert peak == pytest.approx(64 * MIB, abs=2 * MIB)
    assert allocated < 2 * MIB
    assert after_reset < 2 * MIB


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_every_kind_of_out_of_memory_error_is_readable(error: Exception) -> None:
    """Also as the cause of a wrapping error, as torch's pipeline runtime raises it."""

    def fail() -> None:
        with readable_out_of_memory(0, None, "training"):
            raise RuntimeError("failed to run forward") from error

    with pytest.raises(DoesNotFitError, match="Device 0 ran out of memory while training"):
        fail()


def test_other_errors_pass_unchanged() -> None:
    """Only running out of memory is translated."""
    with pytest.raises(ValueError, match=r"^something else$"), readable_out_of_memory(0, None, "training"):
        raise ValueError("something else")
