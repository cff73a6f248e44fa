"""Image files become clean uint8 arrays: which files count, how one is read and resized, and their content hash."""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from . import UserError

# Written in the serving contract: whoever serves the model prepares images by this rule, as training did.
RULE = (
    "EXIF orientation applied; transparency composited on white; 16-bit scaled to 8-bit; converted to {mode}; "
    "shorter side resized to {size} pixels (bilinear, antialiased); centre crop {size}x{size}; uint8, CHW"
)

# A photo of 100 megapixels takes 300 MB once decoded; larger ones are more likely an attack than a picture.
MAX_PIXELS = 100_000_000

SUFFIXES = {suffix for suffix, name in Image.registered_extensions().items() if name in Image.OPEN}


def list_images(folder: Path) -> list[Path]:
    """Every image file below a folder, by its ending, in an order that does not depend on the file system."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.is_dir())
    return sorted(path for path in files if not path.name.startswith("."))


def read_image(path: Path, mode: str, size: int) -> np.ndarray:
    """One file by `RULE`, as a (C, H, W) uint8 array; mode is Pillow's `L` (one channel) or `RGB` (three).

    Raises:
        UserError: The file can't be read as an image, or is larger than `MAX_PIXELS`.
    """
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:  # known from the header, before anything is decoded
                raise UserError(
                    f"{path}: {image.width}x{image.height} pixels, at most {MAX_PIXELS:,} are read. Resize it."
                )
            if image.mode.startswith("I"):  # 16-bit; Pillow would clip it to 255 instead of scaling it
                image = Image.fromarray((np.asarray(image).astype(np.float32) / 257).clip(0, 255).astype(np.uint8))
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            image = ImageOps.fit(image.convert(mode), (size, size), Image.Resampling.BILINEAR)
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds; the name of the file is what the user needs
        raise UserError(f"{path}: can't be read as an image ({error}). Repair or remove it.") from error
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_hashes(files: list[Path], cache_dir: Path) -> list[str]:
    """SHA-256 of every byte of each file; read again only when its size or modification time has changed."""
    cache_file = cache_dir / "file_hashes.json"
    cache = json.loads(cache_file.read_text()) if cache_file.is_file() else {}

    def digest(path: Path) -> tuple[str, list[int | str]]:
        key, stat = str(path.resolve()), path.stat()
        known = cache.get(key)
        if known and known[:2] == [stat.st_size, stat.st_mtime_ns]:
            return key, known
        return key, [stat.st_size, stat.st_mtime_ns, file_hash(path)]

    try:
        with ThreadPoolExecutor() as pool:
            entries = list(pool.map(digest, files))
    except OSError as error:
        raise UserError(f"{error.filename}: can't be read ({error.strerror}). Repair or remove it.") from error
    cache.update(entries)
    replace_file(cache_file, json.dumps(cache).encode())
    return [str(entry[2]) for _, entry in entries]


def combine_hashes(parts: Iterable[str]) -> str:
    """One SHA-256 over a sequence of texts; where one ends and the next begins matters."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that others see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def load_images(files: list[Path], mode: str, size: int, key: str, cache_dir: Path) -> Tensor:
    """All files by `RULE`, decoded once: (N, C, size, size) uint8, memory-mapped from the cache.

    Args:
        files: What to read, in this order.
        mode: Pillow's `L` or `RGB`.
        size: Height and width in pixels.
        key: Hash of the files' contents; with the rule, the name of the cache file.
        cache_dir: Where decoded images are kept: N x C x size x size bytes.
    """
    name = combine_hashes([key, RULE.format(mode=mode, size=size)])
    path = cache_dir / f"{name[:32]}.npy"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / f"{name[:32]}.lock"):  # one process decodes, the others wait for its file
        if not path.is_file():
            part = path.with_suffix(".part")
            shape = (len(files), {"L": 1, "RGB": 3}[mode], size, size)
            array = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
            with ThreadPoolExecutor() as pool:
                decoded = pool.map(lambda file: read_image(file, mode, size), files)
                for index, image in enumerate(tqdm(decoded, "decode images", total=len(files), disable=None)):
                    array[index] = image
            array.flush()
            part.replace(path)
    # Copy-on-write: torch wants writable memory, and the file stays as it is.
    return torch.from_numpy(np.load(path, mmap_mode="c"))
