"""One pass over the image files of a data set: what can't be used, what is equal, and the pixels, decoded once."""

import contextlib
import hashlib
import json
import os
import shutil
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from filelock import FileLock
from PIL import Image
from tqdm import tqdm

from . import UserError, usable_cores
from .images import RULE, Files, Stored, combine_hashes, decode, fit, replace_file

CHUNK = 256  # files between two looks at the clock; bounds what waits in memory to be written
Look = tuple[str, str, dict[str, Any] | None, np.ndarray | None]
SAVE_EVERY = 10  # seconds; what a pass that is killed has to do again


@dataclass
class Scan:
    """What a pass found out; all but `faults` is of the usable files alone.

    Args:
        kept: (N,) int64 positions of the usable files in the list.
        faults: Why a file can't be used, by its position in the list.
        images: Indexed like a tensor of (N, size, size, C) uint8.
        hashes: SHA-256 of each file's content.
        notes: How many files were converted, in which way.
        pixel_keys: Equal where the resized pixels are equal, in whatever format they came.
        dhashes: (N,) uint64; images that look alike differ in few bits.
    """

    kept: np.ndarray
    faults: dict[int, str]
    images: Files | Stored
    hashes: list[str]
    notes: Counter[str]
    pixel_keys: list[str]
    dhashes: np.ndarray


def difference_hash(pixels: np.ndarray) -> int:
    """64 bits of (H, W, C) uint8: where brightness rises from left to right in a picture of 9x8 cells (Neal Krawetz,
    "Kind of like that", 2013). The middle channel, green, stands for brightness."""
    step = max(1, len(pixels) // 64)
    gray = Image.fromarray(np.ascontiguousarray(pixels[::step, ::step, pixels.shape[2] // 2]))
    cells = np.asarray(gray.resize((9, 8), Image.Resampling.BOX))
    return int.from_bytes(np.packbits(cells[:, 1:] > cells[:, :-1]).tobytes(), "big")


def read(content: bytes, mode: str, size: int) -> tuple[dict[str, Any], np.ndarray | None]:
    """What is to be known of a file's content, and its pixels, (size, size, C) uint8, if it has any."""
    try:
        pixels, notes = decode(content, mode)
    except Exception as error:  # each of Pillow's decoders raises its own kind
        reason = "the file is empty" if not content else str(error) or type(error).__name__
        return {"fault": " ".join(reason.split(" <_io.BytesIO")[0].split())}, None
    pixels = fit(pixels, size)
    dhash = difference_hash(pixels)
    return {"notes": notes, "dhash": dhash, "key": f"{zlib.crc32(pixels.data):08x}{dhash:016x}"}, pixels


class Cache:
    """Decoded images, each stored once under the hash of its file's content, and what is known of every file.

    `.pixels` grows by rows; `.json` says what they hold, and is replaced as a whole once they are written. So a pass
    that is killed leaves nothing half-done: rows that the index does not name are written again.
    """

    def __init__(self, folder: Path, mode: str, size: int) -> None:
        self.mode, self.size = mode, size
        self.image_shape = (size, size, 3 if mode == "RGB" else 1)
        self.row_bytes = int(np.prod(self.image_shape))
        name = combine_hashes([RULE, mode, str(size)])[:16]
        self.index_path, self.pixels_path = folder / f"{name}.json", folder / f"{name}.pixels"
        self.index: dict[str, Any] = {"files": {}, "contents": {}, "rows": 0}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or damaged: all is read again
            index = json.loads(self.index_path.read_text())
            if not index["rows"] or index["rows"] * self.row_bytes <= self.pixels_path.stat().st_size:
                self.index = index

    def knows(self, key: str, store: bool) -> bool:
        """Whether nothing has to be read to use the file with this key."""
        entry = self.index["contents"].get(self.index["files"].get(key))
        return entry is not None and (not store or "row" in entry or "fault" in entry)

    def add(self, new: dict[str, Path], store: bool) -> dict[str, str]:
        """Read files, on all cores; returns why some can't be read at all, by key.

        Raises:
            UserError: The disk is too small for the decoded images.
        """
        needed, free = len(new) * self.row_bytes, shutil.disk_usage(self.pixels_path.parent).free
        if store and needed > free:
            self.refuse(f"{needed / 2**30:.2f} GiB are needed, {free / 2**30:.2f} are free")
        unreadable: dict[str, str] = {}
        saved, items = time.monotonic(), list(new.items())
        one_thread = partial(torch.set_num_threads, 1)  # each: together they use all cores
        if store:
            self.pixels_path.touch()
        with (
            open(self.pixels_path if store else os.devnull, "r+b") as pixels,
            ThreadPoolExecutor(usable_cores(), initializer=one_thread) as pool,
            tqdm(desc="read images", total=len(new), disable=None) as bar,
        ):
            pixels.seek(self.index["rows"] * self.row_bytes)
            for start in range(0, len(items), CHUNK):
                chunk = items[start : start + CHUNK]
                tasks = [chunk[row : row + 16] for row in range(0, len(chunk), 16)]
                for key, digest, entry, image in chain.from_iterable(pool.map(partial(self.look, store=store), tasks)):
                    if entry is not None and not digest:
                        unreadable[key] = entry["fault"]
                    elif entry is not None and not self.knows(key, store):
                        if image is not None and store:
                            entry["row"] = self.index["rows"]
                            self.index["rows"] += 1
                            pixels.write(image.data)
                        self.index["contents"][digest] = entry
                bar.update(len(chunk))
                if time.monotonic() - saved > SAVE_EVERY or start + CHUNK >= len(items):
                    pixels.flush()
                    if store:
                        os.fsync(pixels.fileno())
                    replace_file(self.index_path, json.dumps(self.index).encode())
                    saved = time.monotonic()
        return unreadable

    def look(self, items: list[tuple[str, Path]], store: bool) -> list[Look]:
        """Key, content hash, and, unless they are known, properties and pixels of some files."""
        found: list[Look] = []
        for key, path in items:
            try:
                content = path.read_bytes()
            except OSError as error:
                found.append((key, "", {"fault": error.strerror}, None))
                continue
            digest = hashlib.sha256(content).hexdigest()
            self.index["files"][key] = digest
            known = self.knows(key, store)
            found.append((key, digest, None, None) if known else (key, digest, *read(content, self.mode, self.size)))
        return found

    def refuse(self, reason: str) -> NoReturn:
        raise UserError(
            f"Decoded images can't be kept in {self.pixels_path.parent}: {reason}. Set --data.cache_dir to a folder on "
            "another disk, or --data.cache_gb 0 to do without."
        )


def scan(files: list[Path], mode: str, size: int, cache_dir: Path, cache_gb: float) -> Scan:
    """Look at every file, and decode those that are new or have changed.

    Args:
        files: Image files.
        mode: Pillow's `L` (one channel) or `RGB` (three).
        size: Height and width of the decoded images in pixels.
        cache_dir: Where decoded images are kept.
        cache_gb: If all images would take more GiB than this, none are kept; they are decoded at each use.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    keys, faults = {}, {}
    for row, path in enumerate(files):
        try:
            stat = path.stat()
            keys[row] = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}"
        except OSError as error:
            faults[row] = f"can't be read: {error.strerror}"
    with FileLock(cache_dir / "lock"):  # one process decodes, the others wait for its pixels
        cache = Cache(cache_dir, mode, size)
        store = len(files) * cache.row_bytes <= cache_gb * 2**30
        if new := {key: files[row] for row, key in keys.items() if not cache.knows(key, store)}:
            try:
                unreadable = cache.add(new, store)
            except OSError as error:  # files that can't be read raise none here: this is the disk of the cache
                cache.refuse(str(error.strerror))
            faults |= {row: f"can't be read: {unreadable[key]}" for row, key in keys.items() if key in unreadable}
    hashes = {row: cache.index["files"][key] for row, key in keys.items() if row not in faults}
    entries = {row: cache.index["contents"][digest] for row, digest in hashes.items()}
    faults |= {row: entry["fault"] for row, entry in entries.items() if "fault" in entry}
    kept = [row for row in entries if row not in faults]
    shape = (len(kept), *cache.image_shape)
    stored = np.array([entries[row].get("row", -1) for row in kept], dtype=np.int64)
    return Scan(
        kept=np.array(kept, dtype=np.int64),
        faults=dict(sorted(faults.items())),
        images=Stored(cache.pixels_path, stored, shape) if store else Files([files[row] for row in kept], mode, shape),
        hashes=[hashes[row] for row in kept],
        notes=Counter(note for row in kept for note in entries[row]["notes"]),
        pixel_keys=[entries[row]["key"] for row in kept],
        dhashes=np.array([entries[row]["dhash"] for row in kept], dtype=np.uint64),
    )
