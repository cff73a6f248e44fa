"""Random changes of training images, on the device that trains, a whole batch at a time. Add yours here."""

import torch
from torch import Tensor
from torch.nn import functional as F


def augment(images: Tensor, max_shift: int) -> Tensor:
    """What every training batch goes through: (B, C, H, W) uint8 -> the same, each sample with its own draws."""
    return shift(images, max_shift)


def shift(images: Tensor, pixels: int) -> Tensor:
    """Move each image by its own random offset of up to `pixels` along both axes; the rim is zero."""
    height, width = images.shape[-2:]
    padded = F.pad(images, [pixels] * 4)
    top, left = torch.randint(0, 2 * pixels + 1, (2, len(images), 1, 1), device=images.device)
    rows = top + torch.arange(height, device=images.device).view(1, -1, 1)
    columns = left + torch.arange(width, device=images.device).view(1, 1, -1)
    sample = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    return padded[sample, :, rows, columns].permute(0, 3, 1, 2)
