"""Image files become clean uint8 arrays: which files count, how one is read and resized, and their content hash."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from . import UserError

# Part of the serving contract: whoever serves the model prepares images by this rule, as training did.
RULE = (
    "EXIF orientation applied; 16-bit scaled to 8-bit; transparency composited on white; converted to {mode}; resized "
    "(bilinear, antialiased) and centre-cropped to {size}x{size} pixels; uint8, channels first"
)
MAX_PIXELS = 100_000_000  # takes 300 MB decoded; a larger file is more likely an attack than a picture
# Pillow names these formats, but leaves reading them to other programs, or can't read them at all.
FOREIGN = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
SUFFIXES = {suffix for suffix, name in Image.registered_extensions().items() if name in Image.OPEN.keys() - FOREIGN}


def list_images(folder: Path) -> list[Path]:
    """Every image file below a folder, by its ending, in an order that does not depend on the file system."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.is_dir())
    return sorted(path for path in files if not path.name.startswith("."))


def read_image(path: Path, mode: str, size: int) -> np.ndarray:
    """One file by `RULE`, as a (C, size, size) uint8 array; mode is Pillow's `L` (one channel) or `RGB` (three).

    Raises:
        UserError: The file can't be read as an image, or has more than `MAX_PIXELS`.
    """
    try:
        with Image.open(path, formats=sorted(Image.OPEN.keys() - FOREIGN)) as image:
            if image.width * image.height > MAX_PIXELS:  # known from the header, before anything is decoded
                raise ValueError(f"{image.width}x{image.height} pixels, at most {MAX_PIXELS:,} are read")
            upright: Image.Image = ImageOps.exif_transpose(image)
            if upright.mode in ("I", "F"):
                raise ValueError("32-bit pixels have no stated range; save it with 8 or 16 bits")
            if upright.mode.startswith("I;16"):  # scaled here, for Pillow would clip it to 255
                pixels = np.asarray(upright).astype(np.float32)
                pixels[pixels == upright.info.get("transparency", -1)] = 65535  # what shows through: white
                upright = Image.fromarray((pixels / 257).round().astype(np.uint8))
            if upright.has_transparency_data:
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
            array = np.asarray(ImageOps.fit(upright.convert(mode), (size, size), Image.Resampling.BILINEAR))
    except Exception as error:  # each of Pillow's decoders raises its own kind; what helps is the name of the file
        raise UserError(f"{path} can't be used as an image: {error}. Repair or remove it.") from error
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_hashes(files: list[Path], cache_dir: Path) -> list[str]:
    """SHA-256 of each file's bytes; read again only when path, size or modification time has changed.

    Raises:
        UserError: A file can't be read.
    """
    cache_file = cache_dir / "file_hashes.json"
    cache: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # none yet, or damaged: then all is read again
        cache = json.loads(cache_file.read_text())
    try:
        keys = [f"{path.resolve()} {(stat := path.stat()).st_size} {stat.st_mtime_ns}" for path in files]
        new = {key: path for key, path in zip(keys, files, strict=True) if key not in cache}
        with ThreadPoolExecutor() as pool:
            cache |= zip(new, pool.map(file_hash, new.values()), strict=True)
    except OSError as error:
        raise UserError(f"{error.filename} can't be read: {error.strerror}. Repair or remove it.") from error
    if new:
        replace_file(cache_file, json.dumps(cache).encode())
    return [cache[key] for key in keys]


def combine_hashes(parts: Iterable[str]) -> str:
    """One SHA-256 over a sequence of texts, in which it matters where one ends and the next begins."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that others see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def load_images(files: list[Path], mode: str, size: int, key: str, cache_dir: Path) -> Tensor:
    """All files by `RULE`, (N, C, size, size) uint8: decoded once, and memory-mapped from the cache ever after.

    Args:
        key: Hash of the files' contents; with the rule, it names the cache file.
    """
    path = cache_dir / f"{combine_hashes([key, RULE.format(mode=mode, size=size)])[:32]}.npy"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # one process decodes, the others wait for its file
        with contextlib.suppress(FileNotFoundError, ValueError, EOFError):  # none yet, or damaged
            # Copy-on-write: torch wants writable memory, and the file stays as it is.
            return torch.from_numpy(np.load(path, mmap_mode="c"))
        part = path.with_suffix(".part")
        shape = (len(files), 3 if mode == "RGB" else 1, size, size)
        array = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
        with ThreadPoolExecutor() as pool:
            images = pool.map(partial(read_image, mode=mode, size=size), files)
            for index, image in enumerate(tqdm(images, "decode images", total=len(files), disable=None)):
                array[index] = image
        array.flush()
        part.replace(path)
        return torch.from_numpy(np.load(path, mmap_mode="c"))


def channel_statistics(images: Tensor, rows: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel over some rows of (N, C, H, W) uint8, in units of [0, 1].

    In small pieces: as float32 at once, a data set would take several times its own memory.
    """
    total = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for piece in rows.split(256):
        pixels = images[piece].double() / 255
        total += torch.stack([pixels.sum(dim=(0, 2, 3)), pixels.square().sum(dim=(0, 2, 3))])
    mean, square = total / (len(rows) * images[0, 0].numel())
    return mean.tolist(), (square - mean.square()).clamp(min=1e-6).sqrt().tolist()  # an unused channel has no deviation
