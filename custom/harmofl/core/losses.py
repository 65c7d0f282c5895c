"""Losses that MONAI offers in parts only."""

import torch
from torch import Tensor, nn


class DiceLossIgnoring(nn.Module):
    """Soft Dice loss in which the pixels of one label count neither in the value nor in the gradient.

    One minus the Dice of each class, background included, over the whole batch, averaged over the classes (Milletari
    et al., V-Net, section 3, without the squares). A class that the batch does not hold adds about 1 and hardly any
    gradient; a batch without a pixel that counts has the loss 0 and no gradient.
    """

    def __init__(self, ignored: int) -> None:
        """Build MONAI's masked loss.

        Args:
            ignored: label of the pixels to leave out, none of the classes.
        """
        super().__init__()
        from monai.losses.dice import MaskedDiceLoss
        from monai.networks.utils import one_hot

        self._ignored = ignored
        self._one_hot = one_hot
        # It masks targets before its own one-hot step, which would turn pixels left out into true background.
        self._loss = MaskedDiceLoss(softmax=True, batch=True, to_onehot_y=False)

    def forward(self, logits_BCHW: Tensor, targets_BHW: Tensor) -> Tensor:
        """Scalar loss of logits (B, C, H, W) and targets (B, H, W) int64, classes 0 to C - 1 or the label left out.

        Raises:
            RuntimeError: a target on the CPU is another number.
        """
        counted = (targets_BHW != self._ignored).unsqueeze(1)
        classes = torch.where(counted, targets_BHW.unsqueeze(1), 0)
        planes = self._one_hot(classes, num_classes=logits_BCHW.shape[1], dtype=logits_BCHW.dtype)
        return self._loss(logits_BCHW, planes, counted.to(logits_BCHW.dtype))
