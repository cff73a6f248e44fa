"""One pass over image files: what can't be used, what is known already, and the cache of decoded images."""

import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }} import scan as scan_module
from {{ cookiecutter.package_name }}.images import Files, Stored
from {{ cookiecutter.package_name }}.scan import Cache, Scan, difference_hash, scan


def plain(path: Path, value: int = 0, size: int = 8) -> Path:
    """A file with a gray square. BMP: any byte of its pixels can be changed without damaging it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), (value, value, value)).save(path)
    return path


def png_header(width: int, height: int) -> bytes:
    """The start of a PNG file, up to where its pixels would begin."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 1000) + b"IDAT"


def jpeg(width: int = 64, height: int = 64, **options) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def look(*files: Path, cache_gb: float = 1, mode: str = "L", size: int = 8) -> Scan:
    return scan(list(files), mode, size, files[0].parent / ".cache", cache_gb)


def values(found: Scan) -> list[int]:
    """One pixel of each usable image."""
    return found.images[torch.arange(len(found.kept))][:, 0, 0, 0].tolist()


# What can't be used


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"no image, but a text", "cannot identify image file"),
        (png_header(8, 8), "truncated"),
        (jpeg()[:-500], "truncated"),
        (jpeg(7, 64), "7x64 pixels, at least 8x8 are needed"),
        (png_header(12_000, 12_000), "12000x12000 pixels, at most 89,478,485 are read"),
        (png_header(20_000, 20_000), "could be decompression bomb"),
    ],
    ids=["empty", "text", "header alone", "cut off", "tiny", "bomb", "large bomb"],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_file_that_can_not_be_used_is_named_with_its_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    bad, good = tmp_path / "holiday.jpg", plain(tmp_path / "good.bmp", 9)
    bad.write_bytes(content)
    found = look(bad, good)
    assert (list(found.faults), found.kept.tolist(), values(found)) == ([0], [1], [9])
    assert reason in found.faults[0]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused(tmp_path: Path, dtype: type) -> None:
    Image.fromarray(np.full((8, 8), 200, dtype)).save(tmp_path / "x.tiff")
    assert "32-bit pixels have no stated range" in look(tmp_path / "x.tiff").faults[0]


def test_postscript_under_another_ending_is_not_run(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.eps")
    path = (tmp_path / "x.eps").rename(tmp_path / "x.png")
    assert "cannot identify image file" in look(path).faults[0]


def test_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.png").symlink_to(tmp_path / "gone.png")
    assert look(tmp_path / "x.png").faults == {0: "can't be read: No such file or directory"}


def test_file_that_can_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain(tmp_path / "x.bmp")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # the superuser, who runs many containers, may read everything
    assert look(path).faults == {0: "can't be read: Permission denied"}


def test_picture_under_the_ending_of_another_format_is_used(tmp_path: Path) -> None:
    path = plain(tmp_path / "x.png", 7).rename(tmp_path / "x.bmp")
    assert values(look(path)) == [7]


def test_conversions_are_counted(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("L", (8, 8)).save(tmp_path / name)
    found = look(tmp_path / "a.png", tmp_path / "b.png", plain(tmp_path / "c.png"), mode="RGB")
    assert found.notes == {"L converted to RGB": 2}


# What is known already


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [plain(tmp_path / f"{index}.bmp", index) for index in range(3)]
    (tmp_path / "bad.bmp").write_bytes(b"bad")
    first = look(*files, tmp_path / "bad.bmp")
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"{self} is read again"))
    again = look(*files, tmp_path / "bad.bmp")
    assert (values(again), again.faults, again.hashes) == (values(first), first.faults, first.hashes)


@pytest.mark.parametrize("change", ["content", "size", "time"])
def test_changed_file_is_read_again(tmp_path: Path, change: str) -> None:
    path = plain(tmp_path / "x.bmp", 1)
    look(path)
    stat = path.stat()
    plain(path, 2, size=9 if change == "size" else 8)
    os.utime(path, ns=(1, 1) if change == "time" else (stat.st_atime_ns, stat.st_mtime_ns + (change == "content")))
    assert values(look(path)) == [2]


def test_new_file_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{index}.bmp", index) for index in (5, 6)]
    look(*files)
    assert values(look(files[1], plain(tmp_path / "new.bmp", 7), files[0])) == [6, 7, 5]


def test_renamed_file_is_not_stored_twice(tmp_path: Path) -> None:
    look(path := plain(tmp_path / "x.bmp", 5))
    look(path.rename(tmp_path / "y.bmp"))
    (pixels,) = (tmp_path / ".cache").glob("*.pixels")
    assert Cache(tmp_path / ".cache", "L", 8).index["rows"] == 1 and pixels.stat().st_size >= 64


def test_equal_files_have_equal_hashes_and_keys(tmp_path: Path) -> None:
    found = look(plain(tmp_path / "a.bmp", 3), plain(tmp_path / "b.bmp", 3), plain(tmp_path / "c.png", 3))
    assert (len(set(found.hashes)), len(set(found.pixel_keys))) == (2, 1)
    assert values(found) == [3, 3, 3]


@pytest.mark.parametrize(("mode", "size", "shape"), [("RGB", 8, (1, 8, 8, 3)), ("L", 16, (1, 16, 16, 1))])
def test_another_size_or_mode_is_decoded_anew(tmp_path: Path, mode: str, size: int, shape: tuple[int, ...]) -> None:
    path = plain(tmp_path / "x.bmp")
    look(path)
    assert look(path, mode=mode, size=size).images[torch.arange(1)].shape == shape


def test_changing_loaded_images_leaves_the_cache_as_it_is(tmp_path: Path) -> None:
    path = plain(tmp_path / "x.bmp", 5)
    look(path).images[torch.arange(1)].fill_(0)
    assert values(look(path)) == [5]


@pytest.mark.parametrize("damage", ["index", "pixels", "no pixels", "other index"])
def test_damaged_cache_is_made_anew(tmp_path: Path, damage: str) -> None:
    path = plain(tmp_path / "x.bmp", 70)
    look(path)
    (index,), (pixels,) = (tmp_path / ".cache").glob("*.json"), (tmp_path / ".cache").glob("*.pixels")
    {
        "index": lambda: index.write_text("{"),
        "other index": lambda: index.write_text("[]"),
        "pixels": lambda: pixels.write_bytes(pixels.read_bytes()[:9]),
        "no pixels": pixels.unlink,
    }[damage]()
    assert values(look(path)) == [70]


# Killed, full, too large


KILLED = """
import os, sys
from pathlib import Path
from {{ cookiecutter.package_name }} import scan
scan.CHUNK, scan.SAVE_EVERY = 4, 0
read, count = scan.read, 0
def read_some(*arguments):
    global count
    count += 1
    if count > 10:
        os.kill(os.getpid(), 9)
    return read(*arguments)
scan.read = read_some
scan.scan(sorted(Path(sys.argv[1]).glob("*.bmp")), "L", 8, Path(sys.argv[1]) / ".cache", 1)
"""


def test_a_pass_that_is_killed_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [plain(tmp_path / f"{index:02}.bmp", index) for index in range(16)]
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(scan_module.__file__).parents[1])
    read_again = []
    read = scan_module.read
    monkeypatch.setattr(scan_module, "read", lambda *rest: read_again.append(1) or read(*rest))
    assert (process.returncode, values(look(*files)), len(read_again)) == (-9, list(range(16)), 8)


def test_disk_without_room_for_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(scan_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        UserError, match="Decoded images can't be kept in .* GiB are needed, .* are free. Set --data.cache_dir"
    ):
        look(plain(tmp_path / "x.bmp"), size=64)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of file sizes are tried on Linux")
def test_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    import resource
    import signal

    files = [plain(tmp_path / f"{index}.bmp", index) for index in range(20)]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 64 * 10, limit[1]))
        with pytest.raises(UserError, match="Decoded images can't be kept in .*File too large. Set --data.cache_dir"):
            look(*files, size=64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert values(look(*files, size=64)) == list(range(20))


def test_beyond_the_limit_images_are_decoded_at_each_use(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{index}.bmp", index) for index in range(3)]
    found = look(*files, cache_gb=0)
    assert isinstance(found.images, Files) and list((tmp_path / ".cache").glob("*.pixels")) == []
    assert values(found) == [0, 1, 2]


def test_a_higher_limit_stores_what_was_only_looked_at(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{index}.bmp", index) for index in range(3)]
    look(*files, cache_gb=0)
    found = look(*files, cache_gb=1)
    assert isinstance(found.images, Stored) and values(found) == [0, 1, 2]


def test_decoding_at_each_use_gives_the_pixels_of_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(jpeg(90, 70))
    stored, decoded = (look(path, cache_gb=limit, size=32).images[torch.arange(1)] for limit in (1, 0))
    assert torch.equal(stored, decoded)


# Pictures that look alike


def smooth(seed: int = 0) -> Image.Image:
    cells = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return Image.fromarray(cells).resize((64, 64), Image.Resampling.BICUBIC)


def test_saving_again_in_another_quality_changes_few_bits(tmp_path: Path) -> None:
    smooth().save(tmp_path / "a.png")
    smooth().save(tmp_path / "b.jpg", quality=60)
    one, two = (int(value) for value in look(tmp_path / "a.png", tmp_path / "b.jpg", mode="RGB", size=32).dhashes)
    assert (one ^ two).bit_count() <= 3


def test_other_pictures_differ_in_many_bits() -> None:
    one, two = (difference_hash(np.asarray(smooth(seed))) for seed in (0, 1))
    assert (one ^ two).bit_count() > 15


def test_a_gradient_to_the_right_rises_everywhere() -> None:
    pixels = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (64, 1))[:, :, None]
    assert difference_hash(pixels) == 2**64 - 1
