"""One image file: which files count, how each is read, converted and resized."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from {{ cookiecutter.package_name }}.images import (
    central,
    channel_statistics,
    combine_hashes,
    decode,
    file_hash,
    fit,
    list_images,
    replace_file,
)


def save(image: Image.Image, path: Path, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def plain(path: Path, value: int = 0, size: int = 8) -> Path:
    """A file with a gray square."""
    return save(Image.new("RGB", (size, size), (value, value, value)), path)


def red_above_blue() -> Image.Image:
    image = Image.new("RGB", (8, 8), "red")
    image.paste("blue", (0, 4, 8, 8))
    return image


def read_image(path: Path, mode: str, size: int) -> np.ndarray:
    """(C, size, size) uint8."""
    return fit(decode(path.read_bytes(), mode)[0], size).transpose(2, 0, 1)


def notes(image: Image.Image, mode: str = "RGB", **options) -> list[str]:
    buffer = io.BytesIO()
    image.save(buffer, **{"format": "PNG", **options})
    return decode(buffer.getvalue(), mode)[1]


# Reading one file


def test_image_is_channels_first_uint8(tmp_path: Path) -> None:
    array = read_image(save(red_above_blue(), tmp_path / "x.png"), "RGB", 4)
    assert (array.dtype, array.shape) == (np.uint8, (3, 4, 4))


def test_gray_mode_gives_one_channel(tmp_path: Path) -> None:
    assert read_image(plain(tmp_path / "x.png", 77), "L", 8).tolist() == np.full((1, 8, 8), 77).tolist()


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise: what is stored on top lies to the right
    array = read_image(save(red_above_blue(), tmp_path / "x.png", exif=exif), "RGB", 8)
    assert array[:, 0, [0, -1]].T.tolist() == [[0, 0, 255], [255, 0, 0]]


def test_exif_orientation_of_16_bit_images_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((8, 8), np.uint16)
    pixels[:4] = 65535
    array = read_image(save(Image.fromarray(pixels), tmp_path / "x.png", exif=exif), "L", 8)
    assert array[0, 0, [0, -1]].tolist() == [0, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_are_white(tmp_path: Path, mode: str) -> None:
    image = Image.new(mode, (8, 8), (0,) * len(mode))
    assert read_image(save(image, tmp_path / "x.png"), "RGB", 8).min() == 255


def test_half_transparent_black_is_gray(tmp_path: Path) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 128))
    assert read_image(save(image, tmp_path / "x.png"), "L", 8)[0, 0, 0] == 127


def test_transparent_palette_entry_is_white(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 0, 0, 0, 0])
    assert read_image(save(image, tmp_path / "x.png", transparency=1), "RGB", 8).min() == 255


def test_palette_gives_its_colors(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert read_image(save(image, tmp_path / "x.png"), "RGB", 8)[:, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("name", ["x.png", "x.tiff"])
def test_16_bit_is_scaled_and_not_clipped(tmp_path: Path, name: str) -> None:
    pixels = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    array = read_image(save(Image.fromarray(pixels), tmp_path / name), "L", 8)
    np.testing.assert_allclose(array[0], pixels / 257, atol=1)


def test_cmyk_gives_rgb(tmp_path: Path) -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert read_image(save(image, tmp_path / "x.tiff"), "RGB", 8)[:, 0, 0].tolist() == [255, 0, 0]


def test_gray_file_gives_three_equal_channels(tmp_path: Path) -> None:
    image = Image.new("L", (8, 8), 77)
    assert read_image(save(image, tmp_path / "x.png"), "RGB", 8)[:, 3, 3].tolist() == [77, 77, 77]


def test_black_and_white_file_spans_the_whole_range(tmp_path: Path) -> None:
    image = Image.new("1", (8, 8), 1)
    assert read_image(save(image, tmp_path / "x.png"), "L", 8).max() == 255


def test_wide_image_is_cropped_around_its_centre(tmp_path: Path) -> None:
    image = Image.new("L", (24, 8), 255)
    image.paste(0, (8, 0, 16, 8))
    assert read_image(save(image, tmp_path / "x.png"), "L", 8).max() == 0


def test_shrinking_averages_over_pixels(tmp_path: Path) -> None:
    striped = np.zeros((64, 64), np.uint8)
    striped[::8] = 255  # one row of eight: without averaging, some rows of the small image would miss them all
    array = read_image(save(Image.fromarray(striped), tmp_path / "x.png"), "L", 8)
    assert array[0, 1:-1].min() > 20 and array.mean() == pytest.approx(255 / 8, abs=4)


@pytest.mark.parametrize("options", [{}, {"quality": 50, "progressive": True}, {"subsampling": 0}])
def test_fast_decoder_gives_the_pixels_of_pillow(tmp_path: Path, options: dict) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 43, 3), np.uint8))
    path = save(noise, tmp_path / "x.jpg", **options)
    np.testing.assert_array_equal(decode(path.read_bytes(), "RGB")[0], np.asarray(Image.open(path)))


@pytest.mark.parametrize("value", [0, 30000])
def test_the_transparent_value_of_16_bits_is_white(tmp_path: Path, value: int) -> None:
    pixels = np.full((8, 8), 257 * 50, np.uint16)
    pixels[:4] = value
    path = save(Image.fromarray(pixels), tmp_path / "x.png")
    content = path.read_bytes()
    chunk = b"tRNS" + struct.pack(">H", value)
    chunk = struct.pack(">I", 2) + chunk + struct.pack(">I", zlib.crc32(chunk))
    end = content.index(b"IDAT") - 4
    path.write_bytes(content[:end] + chunk + content[end:])
    assert read_image(path, "L", 8)[0, [0, -1], 0].tolist() == [255, 50]


def test_whatever_is_converted_is_noted() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    assert [
        notes(Image.new("RGB", (8, 8))),
        notes(Image.new("L", (8, 8))),
        notes(Image.new("P", (8, 8))),
        notes(Image.new("CMYK", (8, 8)), format="JPEG"),
        notes(Image.new("RGBA", (8, 8))),
        notes(Image.new("RGB", (8, 8)), exif=exif),
        notes(Image.fromarray(np.zeros((8, 8), np.uint16)), "L"),
    ] == [
        [],
        ["L converted to RGB"],
        ["P converted to RGB"],
        ["CMYK converted to RGB"],
        ["transparency composited on white"],
        ["turned upright by EXIF"],
        ["16-bit scaled to 8-bit"],
    ]


def test_central_pixels_are_as_far_from_each_edge() -> None:
    assert central(torch.arange(36).view(1, 6, 6), 2)[0].tolist() == [[14, 15], [20, 21]]


def test_statistics_of_channels_are_in_units_of_the_pixel_range() -> None:
    images = torch.stack([torch.full((4, 4, 2), 51), torch.full((4, 4, 2), 102)] * 100).to(torch.uint8)
    images[..., 1] = 255
    mean, std = channel_statistics(images, torch.arange(200))
    assert mean + std == pytest.approx([0.3, 1.0, 0.1, 1e-3])


# Lists of files


def test_images_are_listed_in_order_whatever_the_case_of_their_ending(tmp_path: Path) -> None:
    for name in ("c.png", "a.PNG", "b/b.JpG"):
        plain(tmp_path / name)
    assert [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)[0]] == ["a.PNG", "b/b.JpG", "c.png"]


def test_hidden_files_and_other_files_are_not_listed(tmp_path: Path) -> None:
    plain(tmp_path / ".hidden.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    assert list_images(tmp_path) == ([], [tmp_path / "notes.txt"])


@pytest.mark.parametrize("name", ["a.eps", "a.mpg", "a.h5", "a.wmf"])
def test_files_that_pillow_would_hand_to_other_programs_are_no_images(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert list_images(tmp_path)[0] == []


# Hashes


def test_file_hash_is_sha_256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert file_hash(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_combined_hash_tells_where_a_text_ends() -> None:
    assert combine_hashes(["ab", "c"]) != combine_hashes(["a", "bc"])


def test_replacing_a_file_leaves_no_part_behind(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        replace_file(tmp_path / "sub" / "x", content)
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "sub").iterdir()] == [("x", b"new")]
