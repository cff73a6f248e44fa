"""Image files, their hashes and caches, and the data sets that are made of them."""

import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }}.data import ImageData
from {{ cookiecutter.package_name }}.images import (
    combine_hashes,
    file_hash,
    file_hashes,
    list_images,
    load_images,
    read_image,
    replace_file,
)
from {{ cookiecutter.package_name }}.sources import Source, cut, digits, image_folder, torchvision_set


def save(image: Image.Image, path: Path, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def plain(path: Path, value: int = 0, size: int = 8) -> Path:
    """A file with a gray square. BMP: any byte of its pixels can be changed without damaging it."""
    return save(Image.new("RGB", (size, size), (value, value, value)), path)


def red_above_blue() -> Image.Image:
    image = Image.new("RGB", (8, 8), "red")
    image.paste("blue", (0, 4, 8, 8))
    return image


def png_header(width: int, height: int) -> bytes:
    """The start of a PNG file, up to where its pixels would begin."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 1000) + b"IDAT"


def change_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Classes cat, dog and eel with six images each."""
    for number, name in enumerate(["eel", "dog", "cat"]):
        for index in range(6):
            plain(tmp_path / "photos" / name / f"{index}.bmp", 80 * number + index)
    return tmp_path / "photos"


@pytest.fixture
def cut_folder(folder: Path) -> Path:
    """The same below train/, val/ and test/; there is no dog in val/, and no eel in test/."""
    for name, split in (("cat", "val"), ("eel", "val"), ("cat", "test"), ("dog", "test")):
        plain(folder / split / name / "x.bmp", {"eel": 0, "dog": 80, "cat": 160}[name])
    for name in ("cat", "dog", "eel"):
        (folder / "train").mkdir(exist_ok=True)
        shutil.move(folder / name, folder / "train" / name)
    return folder


def load(folder: Path, **options) -> Source:
    return image_folder(folder, "L", 8, folder.parent / ".cache", **options)


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
    checkered = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    array = read_image(save(Image.fromarray(checkered), tmp_path / "x.png"), "L", 8)
    np.testing.assert_allclose(array, 127, atol=2)


@pytest.mark.parametrize(
    "content", [b"", b"no image, but a text", png_header(8, 8)], ids=["empty", "text", "header alone"]
)
def test_file_that_is_no_image_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "holiday.png"
    path.write_bytes(content)
    with pytest.raises(UserError, match="holiday.png can't be used as an image: .* Repair or remove it"):
        read_image(path, "RGB", 8)


def test_truncated_image_is_named(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8))
    path = save(noise, tmp_path / "holiday.jpg")
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="holiday.jpg can't be used as an image: .*truncated"):
        read_image(path, "RGB", 8)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bomb_is_refused_from_its_header(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(12_000, 12_000))
    with pytest.raises(UserError, match="bomb.png .*12000x12000 pixels, at most 100,000,000 are read"):
        read_image(path, "RGB", 8)


# Lists of files


def test_images_are_listed_in_order_whatever_the_case_of_their_ending(tmp_path: Path) -> None:
    for name in ("c.png", "a.PNG", "b/b.JpG"):
        plain(tmp_path / name)
    assert [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)] == ["a.PNG", "b/b.JpG", "c.png"]


def test_hidden_files_and_other_files_are_not_listed(tmp_path: Path) -> None:
    plain(tmp_path / ".hidden.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    assert list_images(tmp_path) == []


# Hashes


def test_file_hash_is_sha_256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert file_hash(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_combined_hash_tells_where_a_text_ends() -> None:
    assert combine_hashes(["ab", "c"]) != combine_hashes(["a", "bc"])


def test_hashes_of_untouched_files_come_from_the_cache(tmp_path: Path) -> None:
    path = plain(tmp_path / "x.bmp")
    before, stat = file_hashes([path], tmp_path), path.stat()
    change_last_byte(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if it had not been touched
    assert file_hashes([path], tmp_path) == before


def test_file_with_another_modification_time_is_hashed_again(tmp_path: Path) -> None:
    path = plain(tmp_path / "x.bmp")
    file_hashes([path], tmp_path)
    change_last_byte(path)
    os.utime(path, ns=(1, 1))
    assert file_hashes([path], tmp_path) == [file_hash(path)]


def test_file_of_another_size_is_hashed_again(tmp_path: Path) -> None:
    path = plain(tmp_path / "x.bmp")
    file_hashes([path], tmp_path)
    stat = path.stat()
    path.write_bytes(path.read_bytes() + b"1")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_hashes([path], tmp_path) == [file_hash(path)]


def test_hashes_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{index}.bmp", index) for index in range(5)]
    file_hashes(files[1:3], tmp_path)
    assert file_hashes(files[::-1], tmp_path) == [file_hash(path) for path in files[::-1]]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone.png can't be read: No such file"):
        file_hashes([tmp_path / "gone.png"], tmp_path)


def test_replacing_a_file_leaves_no_part_behind(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        replace_file(tmp_path / "sub" / "x", content)
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "sub").iterdir()] == [("x", b"new")]


def test_data_hash_is_the_same_when_nothing_changed(folder: Path) -> None:
    assert load(folder).data_hash == load(folder).data_hash


def test_data_hash_is_the_same_for_a_copy_elsewhere(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert load(copy).data_hash == load(folder).data_hash


def test_data_hash_changes_with_one_byte_of_one_image(folder: Path) -> None:
    before = load(folder).data_hash
    change_last_byte(folder / "dog" / "3.bmp")
    assert load(folder).data_hash != before


def test_data_hash_changes_when_an_image_moves_to_another_class(folder: Path) -> None:
    before = load(folder).data_hash
    (folder / "dog" / "0.bmp").rename(folder / "cat" / "9.bmp")  # the last cat in place of the first dog: equal order
    assert load(folder).data_hash != before


def test_data_hash_changes_when_a_class_is_renamed(folder: Path) -> None:
    before = load(folder).data_hash
    (folder / "dog").rename(folder / "dot")
    assert load(folder).data_hash != before


# The cache of decoded images


def test_images_are_decoded_once(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{index}.bmp", index) for index in range(3)]
    first = load_images(files, "L", 8, "key", tmp_path / "cache")
    for path in files:
        path.unlink()
    assert torch.equal(load_images(files, "L", 8, "key", tmp_path / "cache"), first)


def test_images_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{index}.bmp", index) for index in (7, 3, 5)]
    assert load_images(files, "L", 8, "key", tmp_path)[:, 0, 0, 0].tolist() == [7, 3, 5]


@pytest.mark.parametrize(("mode", "size", "shape"), [("RGB", 8, (1, 3, 8, 8)), ("L", 16, (1, 1, 16, 16))])
def test_another_size_or_mode_is_decoded_anew(tmp_path: Path, mode: str, size: int, shape: tuple[int, ...]) -> None:
    files = [plain(tmp_path / "x.bmp")]
    load_images(files, "L", 8, "key", tmp_path)
    assert load_images(files, mode, size, "key", tmp_path).shape == shape


def test_changing_loaded_images_leaves_the_cache_as_it_is(tmp_path: Path) -> None:
    files = [plain(tmp_path / "x.bmp", 5)]
    load_images(files, "L", 8, "key", tmp_path).fill_(0)
    assert load_images(files, "L", 8, "key", tmp_path).min() == 5


def test_damaged_file_leaves_no_cache_behind(tmp_path: Path) -> None:
    files = [plain(tmp_path / "x.bmp"), tmp_path / "y.bmp"]
    files[1].write_bytes(b"")
    with pytest.raises(UserError, match="y.bmp"):
        load_images(files, "L", 8, "key", tmp_path)
    assert list(tmp_path.glob("*.npy")) == []


# Folders of images


def test_each_image_has_the_label_of_its_folder(folder: Path) -> None:
    source = load(folder)
    shades = source.images[:, 0, 0, 0] // 80  # eel 0, dog 1, cat 2
    assert [source.classes[label] for label in source.labels] == [["eel", "dog", "cat"][shade] for shade in shades]


def test_labels_mean_the_same_class_in_every_split(cut_folder: Path) -> None:
    source = load(cut_folder)
    shades = source.images[:, 0, 0, 0] // 80
    assert [source.classes[label] for label in source.labels] == [["eel", "dog", "cat"][shade] for shade in shades]


def test_splits_of_a_folder_are_kept(cut_folder: Path) -> None:
    splits = load(cut_folder).splits
    assert {name: rows.tolist() for name, rows in splits.items()} == {
        "train": list(range(18)),
        "val": [18, 19],
        "test": [20, 21],
    }


def test_missing_val_split_is_cut_from_train_alone(cut_folder: Path) -> None:
    shutil.rmtree(cut_folder / "val")
    datamodule = ImageData(source=str(cut_folder), image_size=8, val_fraction=0.3)
    datamodule.setup("fit")
    assert {name: len(split) for name, split in datamodule.splits.items()} == {"train": 12, "val": 6, "test": 2}


@pytest.mark.parametrize("split", ["val", "test"])
def test_class_that_train_lacks_is_refused(cut_folder: Path, split: str) -> None:
    plain(cut_folder / split / "fox" / "x.bmp")
    with pytest.raises(UserError, match=rf"{split} has the classes \['fox'\], which .*train lacks"):
        load(cut_folder)


def test_folder_with_one_class_is_refused(tmp_path: Path) -> None:
    plain(tmp_path / "photos" / "cat" / "x.bmp")
    with pytest.raises(UserError, match="has 1 sub-folders, expected one for each of at least 2 classes"):
        load(tmp_path / "photos")


def test_class_without_images_is_refused(folder: Path) -> None:
    (folder / "fox").mkdir()
    with pytest.raises(UserError, match="fox holds no image"):
        load(folder)


def test_hidden_folder_is_no_class(folder: Path) -> None:
    (folder / ".thumbnails").mkdir()
    assert load(folder).classes == ["cat", "dog", "eel"]


def test_class_too_small_to_be_split_is_refused(folder: Path) -> None:
    plain(folder / "fox" / "x.bmp")
    with pytest.raises(UserError, match="No val split of 15% can be cut from .*'fox': 1.*--data.val_fraction"):
        cut(load(folder), "val", 0.15, seed=42)


@pytest.mark.parametrize(("color", "channels"), [(True, 3), (False, 1)])
def test_color_chooses_the_channels_of_a_folder(folder: Path, color: bool, channels: int) -> None:
    datamodule = ImageData(source=str(folder), color=color, val_fraction=0.2, test_fraction=0.2)
    datamodule.setup("fit")
    assert datamodule.input_spec["shape"] == [channels, 64, 64]


# Data sets in memory


def test_digits_span_the_whole_range_of_uint8() -> None:
    images = digits().images
    assert (images.dtype, images.min().item(), images.max().item()) == (torch.uint8, 0, 255)


def test_data_hash_of_digits_is_the_same_at_every_call() -> None:
    assert digits().data_hash == digits().data_hash


def test_torchvision_set_keeps_its_own_test_split(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", 4), ("t10k", 3)):  # the format that the real files have
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + bytes(784 * count))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + bytes(range(count)))
    source = torchvision_set("mnist", tmp_path)
    assert {name: source.labels[rows].tolist() for name, rows in source.splits.items()} == {
        "train": [0, 1, 2, 3],
        "test": [0, 1, 2],
    }


def test_data_set_that_can_not_be_downloaded_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there: as good as no network
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(UserError, match="cifar10 is not in .* and can't be downloaded .*use --data.source digits"):
        torchvision_set("cifar10", tmp_path)


# What used to pass in silence, or to end in a traceback


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused(tmp_path: Path, dtype: type) -> None:
    path = save(Image.fromarray(np.full((8, 8), 200, dtype)), tmp_path / "x.tiff")
    with pytest.raises(UserError, match=r"x\.tiff can't be used as an image: 32-bit pixels have no stated range"):
        read_image(path, "L", 8)


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


@pytest.mark.parametrize("name", ["a.eps", "a.mpg", "a.h5", "a.wmf"])
def test_files_that_pillow_would_hand_to_other_programs_are_no_images(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert list_images(tmp_path) == []


def test_postscript_under_another_ending_is_not_run(tmp_path: Path) -> None:
    path = save(Image.new("RGB", (8, 8)), tmp_path / "x.eps").rename(tmp_path / "x.png")
    with pytest.raises(UserError, match=r"x\.png can't be used as an image: cannot identify image file"):
        read_image(path, "L", 8)


def test_val_without_train_is_refused(folder: Path) -> None:
    (folder / "dog").rename(folder / "val")
    with pytest.raises(UserError, match=r"has \['val'\] and beside them \['cat', 'eel'\]: expected one sub-folder"):
        image_folder(folder, "L", 8, folder.parent / ".cache")


def test_class_beside_train_is_refused(folder: Path) -> None:
    shutil.copytree(folder, folder / "train")
    with pytest.raises(UserError, match=r"has \['train'\] and beside them \['cat', 'dog', 'eel'\]"):
        image_folder(folder, "L", 8, folder.parent / ".cache")


def test_split_without_images_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "split" / "train")
    (tmp_path / "split" / "val" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=r"val holds no image. Add some, or remove the folder to have the split cut"):
        image_folder(tmp_path / "split", "L", 8, tmp_path / ".cache")


def test_damaged_hash_cache_is_made_anew(tmp_path: Path) -> None:
    path = plain(tmp_path / "x.bmp")
    (tmp_path / "file_hashes.json").write_text("{")
    assert file_hashes([path], tmp_path) == [file_hash(path)]


@pytest.mark.parametrize("length", [0, 4, 60, 140])
def test_damaged_image_cache_is_made_anew(tmp_path: Path, length: int) -> None:
    files = [plain(tmp_path / "x.bmp", 70)]
    load_images(files, "L", 8, "key", tmp_path / "cache")
    (cache,) = (tmp_path / "cache").glob("*.npy")
    cache.write_bytes(cache.read_bytes()[:length])
    assert load_images(files, "L", 8, "key", tmp_path / "cache").unique().tolist() == [70]
