"""Instance norm for a CPU: the function of torch's layer, by kernels of torch that suit how the maps lie in memory."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_LAST = torch.channels_last
_aten = torch.ops.aten


class InstanceNorm(nn.InstanceNorm2d):
    """Affine instance norm (Ulyanov et al., 2016) of maps (B, C, H, W) without running statistics, up to rounding.

    Torch's own layer copies maps in channels_last into the other layout and back in each pass; and where a batch has
    one image, the layers before it get wrong gradients from torch 2.13 if a function like SiLU lies behind it. Batch
    norm of one image alone is instance norm and has a kernel for channels_last; group norm with a group per channel is
    instance norm and has the faster kernel for the other layout. `harmofl.core.layout.memory_format` says what that is
    worth. Elsewhere than on a CPU, in an exported graph and in torch.compile the layer is torch's own. Parameters,
    their names and eps are those of torch's layer in all cases.
    """

    def __init__(self, num_features: int, eps: float) -> None:
        """Scale 1 and shift 0 for maps of `num_features` channels."""
        super().__init__(num_features, eps=eps, affine=True)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of each image to mean 0 and variance 1, then scale and shift it.

        Raises:
            ValueError: maps of one pixel, which have no variance.
        """
        written_down = torch.jit.is_tracing() or torch.compiler.is_compiling()
        if input.device.type != "cpu" or input.dim() != 4 or input.shape[2:].numel() == 1 or written_down:
            return super().forward(input)
        if input.is_contiguous(memory_format=_LAST) and not input.is_contiguous():
            normalized: Tensor = _ByImage.apply(input, self.weight, self.bias, self.eps)
            return normalized
        return functional.group_norm(input, self.num_features, self.weight, self.bias, self.eps)


class _ByImage(torch.autograd.Function):
    """Batch norm of each image alone, for maps in channels_last."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(maps)
        # under autocast the maps are of lower precision than the parameters, the statistics are not
        mean, inverse = (weight.new_empty(maps.shape[:2]) for _ in range(2))
        for i in range(len(maps)):
            own = slice(i, i + 1)
            _aten.native_batch_norm.out(
                maps[own], weight, bias, None, None, True, 0.0, eps,
                out=out[own], save_mean=mean[i], save_invstd=inverse[i],
            )  # fmt: skip
        ctx.save_for_backward(maps, weight, mean, inverse)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        maps, weight, mean, inverse = ctx.saved_tensors
        above = gradients[0].contiguous(memory_format=_LAST)
        below = torch.empty_like(maps)
        of_weight, of_bias = (weight.new_empty(maps.shape[:2]) for _ in range(2))
        for i in range(len(maps)):
            own = slice(i, i + 1)
            _aten.native_batch_norm_backward.out(
                above[own], maps[own], weight, None, None, mean[i], inverse[i], True, ctx.eps, [True] * 3,
                out0=below[own], out1=of_weight[i], out2=of_bias[i],
            )  # fmt: skip
        return below, of_weight.sum(0), of_bias.sum(0), None
