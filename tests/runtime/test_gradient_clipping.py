"""The norm of gradients on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.plan.plan import Mesh
from outsize.runtime.gradient_clipping import compute_gradient_norm
from outsize.runtime.mesh import make_process_mesh


@pytest.mark.parametrize("shape", [(), (5,), (300, 400), (8, 16, 3, 3), (0, 4)])
def test_norms_of_single_precision_gradients_are_right_to_seven_digits(shape: tuple[int, ...]) -> None:
    """Against the same gradient in float64; half-precision gradients are widened first."""
    mesh = make_process_mesh(Mesh(), torch.device("cpu"))
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    expected = parameter.grad.double().square().sum().sqrt()
    torch.testing.assert_close(compute_gradient_norm([parameter], mesh), expected, rtol=1e-7, atol=0.0)


def test_norms_of_half_precision_gradients_do_not_overflow() -> None:
    """400 elements of 3e4, whose squares no half-precision number holds: 20 x 3e4."""
    mesh = make_process_mesh(Mesh(), torch.device("cpu"))
    parameter = nn.Parameter(torch.zeros(20, 20, dtype=torch.float16))
    parameter.grad = torch.full((20, 20), 3e4, dtype=torch.float16)
    assert compute_gradient_norm([parameter], mesh).item() == pytest.approx(6e5, rel=1e-6)
