"""Random changes of training batches, on the device that trains, each sample with its own draws. Add yours here."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# What helps on a source and does no harm: a digit must not be mirrored, a garment may be.
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"max_shift": 1},
    "mnist": {"max_shift": 2},
    "fashion_mnist": {"max_shift": 2, "flip": True},
    "cifar10": {"max_shift": 4, "flip": True},
    "cifar100": {"max_shift": 4, "flip": True},
    "files": {"flip": True, "min_area": 0.35},
}
OFF = {"flip": False, "max_shift": 0, "min_area": 1.0, "color_jitter": 0.0, "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}


def choose(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `augment` and `mix`: those that are set, else what suits the source."""
    chosen = {key: options[key] for key in OFF if options[key] is not None}
    return {**OFF, **DEFAULTS.get(source, DEFAULTS["files"]), **chosen}


def augment(images: Tensor, size: int, options: dict[str, Any]) -> Tensor:
    """What every training batch goes through: (B, C, H, W) uint8 -> (B, C, size, size) uint8."""
    mirrored = draw(images) < (0.5 if options["flip"] else 0)
    if options["min_area"] < 1:
        images = random_resized_crop(images, size, options["min_area"], mirrored.flatten())
    elif options["flip"]:
        images = torch.where(mirrored, images.flip(3), images)
    if options["max_shift"]:
        images = shift(images, options["max_shift"])
    if options["color_jitter"]:
        images = color_jitter(images, options["color_jitter"])
    if options["erasing"]:
        images = erase(images, options["erasing"])
    return images


def draw(images: Tensor) -> Tensor:
    """A number in [0, 1) for each sample, (B, 1, 1, 1) float32."""
    return torch.rand(len(images), 1, 1, 1, device=images.device)


def random_boxes(images: Tensor, min_area: float, max_area: float, max_stretch: float) -> Tensor:
    """A box inside each image, (B, 4) float32 top, left, height and width in pixels: its share of the area uniform, its
    shape between 1:max_stretch and max_stretch:1, its place uniform."""
    height, width = images.shape[2:]
    area, stretch, top, left = torch.rand(4, len(images), device=images.device)
    area = (min_area + (max_area - min_area) * area) * height * width
    stretch = max_stretch ** (2 * stretch - 1)
    heights = (area / stretch).sqrt().clamp(1, height)
    widths = (area * stretch).sqrt().clamp(1, width)
    return torch.stack([top * (height - heights), left * (width - widths), heights, widths], dim=1)


def random_resized_crop(images: Tensor, size: int, min_area: float, mirrored: Tensor) -> Tensor:
    """Cut a random box out of each image, at least `min_area` of it (arXiv:1409.4842), and resize it to size x size;
    mirror those that the (B,) bool `mirrored` says."""
    boxes = random_boxes(images, min_area, 1.0, max_stretch=4 / 3)
    return crop_on_gpu(images, boxes, size, mirrored) if images.is_cuda else crop_on_cpu(images, boxes, size, mirrored)


def crop_on_cpu(images: Tensor, boxes: Tensor, size: int, mirrored: Tensor) -> Tensor:
    """One resize for each image: on a processor ten times faster than `grid_sample`, which has no kernel for bytes."""
    crops = []
    for row, (top, left, height, width) in enumerate(boxes.round().int().tolist()):
        crop = images[row : row + 1, :, top : top + max(1, height), left : left + max(1, width)]
        crop = crop.flip(3) if mirrored[row] else crop
        crops.append(F.interpolate(crop, (size, size), mode="bilinear", antialias=True))
    return torch.cat(crops)


def crop_on_gpu(images: Tensor, boxes: Tensor, size: int, mirrored: Tensor) -> Tensor:
    """All images in one kernel."""
    top, left, height, width = (boxes / torch.tensor(images.shape[2:] * 2, device=images.device)).unbind(1)
    zero, to_right = torch.zeros_like(top), 1 - 2 * mirrored.float()
    rows = [width * to_right, zero, 2 * left + width - 1, zero, height, 2 * top + height - 1]
    grid = F.affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), [len(images), 1, size, size], align_corners=False)
    crops = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return crops.round().to(torch.uint8)


def shift(images: Tensor, pixels: int) -> Tensor:
    """Move each image by its own random offset of up to `pixels` along both axes; the rim is zero."""
    height, width = images.shape[-2:]
    padded = F.pad(images, [pixels] * 4)
    top, left = torch.randint(0, 2 * pixels + 1, (2, len(images), 1, 1), device=images.device)
    rows = top + torch.arange(height, device=images.device).view(1, -1, 1)
    columns = left + torch.arange(width, device=images.device).view(1, 1, -1)
    sample = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    return padded[sample, :, rows, columns].permute(0, 3, 1, 2)


def color_jitter(images: Tensor, strength: float) -> Tensor:
    """Brightness, contrast and saturation of each image times its own factor in [1 - strength, 1 + strength]."""
    brightness, contrast, saturation = (1 + strength * (2 * draw(images) - 1) for _ in range(3))
    pixels = images.float() * brightness
    gray = pixels.mean(dim=1, keepdim=True)
    pixels = gray + (pixels - gray) * saturation
    mean = gray.mean(dim=(2, 3), keepdim=True)
    return (mean + (pixels - mean) * contrast).round().clamp(0, 255).to(torch.uint8)


def inside(boxes: Tensor, images: Tensor) -> Tensor:
    """(B, 1, H, W) bool: which pixels lie in the box of their image."""
    top, left, height, width = boxes.round().view(-1, 4, 1, 1, 1).unbind(1)
    rows = torch.arange(images.shape[2], device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(images.shape[3], device=images.device).view(1, 1, 1, -1)
    return (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)


def erase(images: Tensor, probability: float) -> Tensor:
    """Random pixels in a box of 2 to 33 % of some images (arXiv:1708.04896)."""
    erased = inside(random_boxes(images, 0.02, 0.33, max_stretch=3.3), images) & (draw(images) < probability)
    noise = torch.randint(0, 256, images.shape, dtype=torch.uint8, device=images.device)
    return torch.where(erased, noise, images)


def mix(images: Tensor, targets: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Mixup (arXiv:1710.09412) or cutmix (arXiv:1905.04899), or by turns if both are on: each sample with another one.

    Args:
        images: (B, C, H, W) uint8.
        targets: (B, K) float32, the share of each class.
        options: `mixup` and `cutmix`, the parameter of each one's Beta distribution.
    """
    both = options["mixup"] > 0 and options["cutmix"] > 0
    cutting = options["cutmix"] > 0 and not (both and torch.rand(()) < 0.5)
    alpha = torch.tensor(options["cutmix" if cutting else "mixup"], device=images.device)
    share = torch.distributions.Beta(alpha, alpha).sample((len(images),)).view(-1, 1, 1, 1)
    other = torch.randperm(len(images), device=images.device)
    if cutting:
        edges = (1 - share.view(-1, 1)).sqrt() * torch.tensor(images.shape[2:], device=images.device)
        corners = torch.rand_like(edges) * (torch.tensor(images.shape[2:], device=images.device) - edges)
        cut = inside(torch.cat([corners, edges], dim=1), images)
        images, share = torch.where(cut, images[other], images), 1 - cut.float().mean(dim=(1, 2, 3), keepdim=True)
    else:
        images = (images * share + images[other] * (1 - share)).round().to(torch.uint8)
    return images, targets * share.view(-1, 1) + targets[other] * (1 - share.view(-1, 1))
