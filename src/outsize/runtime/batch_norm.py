"""Batch norm whose statistics are taken over a micro-batch of all replicas, on any device.

torch's own ``SyncBatchNorm`` runs on accelerators only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

__all__ = ["SynchronisedBatchNorm", "apply_synchronised_batch_norm"]

_BatchNorm = nn.modules.batchnorm._BatchNorm


class SynchronisedBatchNorm(_BatchNorm):
    """A batch norm layer over all processes of ``group``: outputs, gradients and running statistics are those
    of one process with all their samples, however many each has.

    Every process of the group has to call it as often, and to go backward through it as often.
    """

    group: dist.ProcessGroup

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs samples and channels, not a tensor of {input.dim()} dims")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a tensor of shape (samples, channels, ...)."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        results = _Normalised.apply(input, self.weight, self.bias, self.eps, self.group)  # type: ignore[no-untyped-call]
        output, mean, variance, count = results
        if self.training and self.running_mean is not None:
            self._track(mean, variance, count)
        normalised: torch.Tensor = output
        return normalised

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.to(mean.dtype)
        unbiased = variance * count / (count - 1).clamp_min(1)
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - share).add_(now * share)


def apply_synchronised_batch_norm(module: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Make all batch norm layers of ``module`` take their statistics over ``group``; return their names.

    Layers of classes with a forward of their own stay as they are.
    """
    changed = []
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and type(part).forward is _BatchNorm.forward:
            part.__class__ = SynchronisedBatchNorm  # parameters, buffers and their names stay
            vars(part)["group"] = group
            changed.append(name)
    return changed


class _Normalised(torch.autograd.Function):
    """With x' = (x - mean) / std over all N elements of a channel, y = w x' + b and g the gradient of y:

        gradient of x = w / std (g - sum(g) / N - x' sum(g x') / N)

    where the sums are over all processes; those of w and b are this process's shares of sum(g x') and sum(g).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, ...]:
        """Return the output, and of each channel the mean, the biased variance and the number of elements."""
        mean, variance, count = _statistics(x, group)
        inverse_std = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        ctx.group = group
        output = _normalise(x, mean, inverse_std)
        if weight is not None and bias is not None:
            output = output * _by_channel(weight, x) + _by_channel(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input, the weight and the bias."""
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        normalised = _normalise(x, mean, inverse_std)
        gradient = gradient.to(mean.dtype)
        own = torch.cat([_sum_of_channels(gradient), _sum_of_channels(gradient * normalised)])
        own_bias, own_weight = own.chunk(2)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            mean_gradient, mean_product = (_sum_over(own, ctx.group) / count).chunk(2)
            centred = gradient - _by_channel(mean_gradient, x) - normalised * _by_channel(mean_product, x)
            scale = inverse_std if weight is None else inverse_std * weight
            x_gradient = (centred * _by_channel(scale, x)).to(x.dtype)
        if weight is None:
            return x_gradient, None, None, None, None
        return x_gradient, own_weight.to(weight.dtype), own_bias.to(weight.dtype), None, None


def _statistics(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and biased variance of each channel, and its number of elements, over the group."""
    num_channels = x.shape[1]
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(values, _dims_of_a_channel(x), correction=0)
    count = mean.new_full((1,), x.numel() // num_channels)
    if isinstance(x, FakeTensor):  # a recording sees shapes alone, and nothing may be sent
        return mean, variance, count
    own = torch.cat([mean, variance, count])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group)
    means, variances, counts = torch.split(torch.stack(gathered), [num_channels, num_channels, 1], dim=1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, variance, total


def _sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone()
    if not isinstance(tensor, FakeTensor):
        dist.all_reduce(total, group=group)
    return total


def _normalise(x: torch.Tensor, mean: torch.Tensor, inverse_std: torch.Tensor) -> torch.Tensor:
    return (x.to(mean.dtype) - _by_channel(mean, x)) * _by_channel(inverse_std, x)


def _sum_of_channels(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum(_dims_of_a_channel(tensor))


def _dims_of_a_channel(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one value a channel, shaped to go with a tensor of (samples, channels, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
