"""A grid of samples as one PNG, because people find wrong labels and wrong augmentations by looking."""

import io

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

COLUMNS, ROWS, SIDE, MARGIN, LINE = 8, 4, 120, 6, 16  # pixels


def caption(target: Tensor, classes: list[str]) -> list[str]:
    """One or two lines: the class or number; the labels that hold; or, of a mixed sample, the two largest shares."""
    if target.ndim == 0 and target.is_floating_point():
        return [f"{target:.4g}"]
    if target.ndim == 0:
        return [classes[int(target)]]
    shares, rows = target.topk(min(2, len(classes)))
    if bool((target == target.round()).all()):
        names = [classes[row] for row in torch.nonzero(target)[:, 0].tolist()]
        return [", ".join(names) or "no label"]
    return [f"{share:.2f} {classes[row]}" for share, row in zip(shares.tolist(), rows.tolist(), strict=True) if share]


def picture(images: Tensor, targets: Tensor, classes: list[str]) -> bytes:
    """The first images of a batch with their labels, as a PNG; nothing where the inputs are no images.

    Args:
        images: (B, 1 or 3, H, W) uint8.
        targets: (B,) int64 class indices, or (B, K) float32.
        classes: K names.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
        return b""
    count = min(len(images), COLUMNS * ROWS)
    rows = -(-count // COLUMNS)
    cell = (SIDE + MARGIN, SIDE + 2 * LINE + MARGIN)
    sheet = Image.new("RGB", (COLUMNS * cell[0] + MARGIN, rows * cell[1] + MARGIN), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for number in range(count):
        left, top = MARGIN + number % COLUMNS * cell[0], MARGIN + number // COLUMNS * cell[1]
        pixels = images[number].cpu().permute(1, 2, 0).expand(-1, -1, 3).numpy()
        # Enlarged without smoothing: single pixels are what the network gets.
        sheet.paste(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, top))
        for line, text in enumerate(caption(targets[number].cpu(), classes)):
            pen.text((left, top + SIDE + line * LINE), text[:18], fill="black", font=font)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()
