"""Image files become clean uint8 arrays: which files count, and the one rule by which each is read and resized."""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from simplejpeg import decode_jpeg
from torch import Tensor
from torch.nn import functional as F

# Part of the serving contract: whoever serves the model prepares images by this rule, as training did.
RULE = (
    "EXIF orientation applied; 16-bit scaled to 8-bit; transparency composited on white; converted to {mode}; the "
    "central square resized (bilinear, antialiased) to {stored}x{stored} pixels, of which the central {size}x{size} "
    "are taken; uint8, channels first"
)
MAX_PIXELS = 89_478_485  # Pillow's own limit: 256 MiB decoded; a larger file is more likely an attack than a picture
MIN_SIDE = 8  # pixels; what the network needs, and less than any picture of something has
# Pillow names these formats, but leaves reading them to other programs, or can't read them at all.
FOREIGN = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
SUFFIXES = {suffix for suffix, name in Image.registered_extensions().items() if name in Image.OPEN.keys() - FOREIGN}
FORMATS = sorted(Image.OPEN.keys() - FOREIGN, key=lambda name: (name not in ("JPEG", "PNG"), name))  # tried in turn


def list_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """The image files below a folder, by their endings, and its other files; hidden ones are in neither. Their order
    does not depend on the file system."""
    images: list[Path] = []
    others: list[Path] = []
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.startswith("."):
                (images if os.path.splitext(name)[1].lower() in SUFFIXES else others).append(Path(place, name))
    return sorted(images), sorted(others)


def decode(content: bytes, mode: str) -> tuple[np.ndarray, list[str]]:
    """The pixels of a file's content, (H, W, C) uint8 and upright, and what had to be converted, in words.

    Args:
        mode: Pillow's `L` (one channel) or `RGB` (three).

    Raises:
        ValueError: More than `MAX_PIXELS`, by the header alone, or less than `MIN_SIDE`, or pixels without a range.
        Exception: Whatever Pillow's decoders raise for a damaged file.
    """
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels, at most {MAX_PIXELS:,} are read")
        if min(image.size) < MIN_SIDE:
            raise ValueError(f"{image.width}x{image.height} pixels, at least {MIN_SIDE}x{MIN_SIDE} are needed")
        turned = image.getexif().get(0x0112, 1) != 1  # the orientation tag
        if image.format == "JPEG" and image.mode == mode == "RGB" and not turned:
            with contextlib.suppress(ValueError):  # of a damaged file, Pillow says better what is wrong with it
                return decode_jpeg(content), []  # Pillow's pixels, bit by bit, in less time
        notes = ["turned upright by EXIF"] if turned else []
        upright: Image.Image = ImageOps.exif_transpose(image)
        if upright.mode in ("I", "F"):
            raise ValueError("32-bit pixels have no stated range; save it with 8 or 16 bits")
        if upright.mode.startswith("I;16"):  # scaled here, for Pillow would clip it to 255
            notes.append("16-bit scaled to 8-bit")
            pixels = np.asarray(upright).astype(np.float32)
            pixels[pixels == upright.info.get("transparency", -1)] = 65535  # what shows through: white
            upright = Image.fromarray((pixels / 257).round().astype(np.uint8))
        if upright.has_transparency_data:
            notes.append("transparency composited on white")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
        elif upright.mode != mode:
            notes.append(f"{upright.mode} converted to {mode}")
        array = np.array(upright.convert(mode))
    return array[:, :, None] if array.ndim == 2 else array, notes


def fit(pixels: np.ndarray, size: int) -> np.ndarray:
    """The central square of (H, W, C) uint8, resized to (size, size, C)."""
    height, width, _ = pixels.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    batch = torch.from_numpy(pixels).unsqueeze(0)  # before it is cut: so torch sees, and keeps, the order of the bytes
    square = batch[:, top : top + side, left : left + side].permute(0, 3, 1, 2)
    resized = F.interpolate(square, (size, size), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)[0].contiguous().numpy()


def central(images: Tensor, size: int) -> Tensor:
    """The central (size, size) pixels of (..., H, W)."""
    top, left = ((images.shape[axis] - size) // 2 for axis in (-2, -1))
    return images[..., top : top + size, left : left + size]


@dataclass
class Files:
    """Images that are decoded whenever they are asked for: indexed like a tensor of (N, size, size, C) uint8."""

    files: list[Path]
    mode: str
    shape: tuple[int, ...]

    def __getitem__(self, rows: Tensor) -> Tensor:
        images = [fit(decode(self.files[row].read_bytes(), self.mode)[0], self.shape[1]) for row in rows.tolist()]
        return torch.from_numpy(np.stack(images))


@dataclass
class Stored:
    """Rows of a file of pixels, indexed like a tensor of (N, size, size, C) uint8. Opened at each use, which costs
    microseconds, so that worker processes are sent a path and no pixels."""

    path: Path
    rows: np.ndarray
    shape: tuple[int, ...]

    def __getitem__(self, rows: Tensor) -> Tensor:
        pixels = np.memmap(self.path, np.uint8, "r").reshape(-1, *self.shape[1:])
        return torch.from_numpy(pixels[self.rows[rows.numpy()]])


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def combine_hashes(parts: Iterable[str]) -> str:
    """One SHA-256 over a sequence of texts, in which it matters where one ends and the next begins."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that others see the old content or the new, never a part; nor does a power cut leave one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name as well
    finally:
        os.close(folder)


def channel_statistics(images: Any, rows: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel over some rows of (N, H, W, C) uint8, in units of [0, 1].

    In small pieces, for as float32 at once the images would take several times their own memory; and of large images
    some pixels tell as much as all.
    """
    step = max(1, images.shape[1] // 64)
    pieces = (images[piece][:, ::step, ::step].float() / 255 for piece in rows.split(64))
    parts = [torch.var_mean(piece, dim=(1, 2), correction=0) for piece in pieces]
    variances, means = (torch.cat(part).double() for part in zip(*parts, strict=True))
    std = (variances.mean(dim=0) + means.var(dim=0, correction=0)).clamp(min=1e-6).sqrt()
    return means.mean(dim=0).tolist(), std.tolist()  # clamped, because an unused channel has no deviation
