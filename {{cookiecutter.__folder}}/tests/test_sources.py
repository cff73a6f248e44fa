"""Folders, CSV files and published data sets: classes, labels, splits, groups and hashes."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from {{ cookiecutter.package_name }} import DataFaults, UserError
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.sources import Source, digits, file_source, torchvision_set

SHADES = {"eel": 0, "dog": 80, "cat": 160}


def plain(path: Path, value: int = 0, size: int = 8) -> Path:
    """A file with a gray square. BMP: any byte of its pixels can be changed without damaging it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), (value, value, value)).save(path)
    return path


def change_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Classes cat, dog and eel with six images each."""
    for name, shade in SHADES.items():
        for index in range(6):
            plain(tmp_path / "photos" / name / f"{index}.bmp", shade + index)
    return tmp_path / "photos"


@pytest.fixture
def cut_folder(folder: Path) -> Path:
    """The same below train/, val/ and test/; there is no dog in val/, and no eel in test/."""
    for number, (name, split) in enumerate([("cat", "val"), ("eel", "val"), ("cat", "test"), ("dog", "test")]):
        plain(folder / split / name / "x.bmp", SHADES[name] + 20 + number)
    for name in SHADES:
        (folder / "train").mkdir(exist_ok=True)
        shutil.move(folder / name, folder / "train" / name)
    return folder


def load(path: Path, group: str | None = None) -> Source:
    return file_source(path, "L", 8, 8, group, path.parent / ".cache", 1)


def set_up(source: Path, **options) -> DataModule:
    datamodule = DataModule(source=str(source), image_size=8, min_area=1, **options)
    datamodule.setup("fit")
    return datamodule


def shades(source: Source) -> list[int]:
    return source.images[torch.arange(len(source.labels))][:, 0, 0, 0].tolist()


def write_csv(folder: Path, text: str) -> Path:
    path = folder / "labels.csv"
    path.write_text(text, "utf-8")
    return path


# Folders


@pytest.mark.parametrize("fixture", ["folder", "cut_folder"])
def test_each_image_has_the_label_of_its_folder(request: pytest.FixtureRequest, fixture: str) -> None:
    source = load(request.getfixturevalue(fixture))
    names = ["eel", "dog", "cat"]
    assert [source.classes[label] for label in source.labels] == [names[shade // 80] for shade in shades(source)]


def test_images_may_lie_deeper_in_the_folder_of_their_class(folder: Path) -> None:
    plain(folder / "dog" / "2024" / "may" / "x.bmp", 99)
    source = load(folder)
    assert source.classes[source.labels[source.names.index("dog/2024/may/x.bmp")]] == "dog"


def test_splits_of_a_folder_are_kept(cut_folder: Path) -> None:
    splits = {name: rows.tolist() for name, rows in load(cut_folder).splits.items()}
    assert splits == {"train": list(range(18)), "val": [18, 19], "test": [20, 21]}


def test_missing_val_split_is_cut_from_train_alone(cut_folder: Path) -> None:
    shutil.rmtree(cut_folder / "val")
    splits = set_up(cut_folder, val_fraction=0.3).splits
    assert {name: len(split) for name, split in splits.items()} == {"train": 12, "val": 6, "test": 2}


@pytest.mark.parametrize("split", ["val", "test"])
def test_class_that_train_lacks_is_a_fault(cut_folder: Path, split: str) -> None:
    plain(cut_folder / split / "fox" / "x.bmp", 250)
    with pytest.raises(DataFaults, match=rf"{split} has the classes \['fox'\], which train lacks"):
        set_up(cut_folder)


def test_class_that_val_lacks_shifts_no_label(cut_folder: Path) -> None:
    shutil.rmtree(cut_folder / "val" / "cat")  # the first of the classes
    source = load(cut_folder)
    assert [source.classes[source.labels[row]] for row in source.splits["val"]] == ["eel"]


def test_folder_with_one_class_is_a_fault(tmp_path: Path) -> None:
    for index in range(9):
        plain(tmp_path / "photos" / "cat" / f"{index}.bmp", index)
    assert load(tmp_path / "photos").faults == [f"{tmp_path / 'photos'} has 1 classes in train, expected at least 2."]


def test_empty_class_keeps_its_number(folder: Path) -> None:
    (folder / "ant").mkdir()
    source = load(folder)
    assert (source.classes, set(source.labels.tolist())) == (["ant", "cat", "dog", "eel"], {1, 2, 3})


def test_hidden_folder_is_no_class(folder: Path) -> None:
    (folder / ".thumbnails").mkdir()
    assert load(folder).classes == ["cat", "dog", "eel"]


def test_files_that_are_no_images_are_ignored_and_counted(folder: Path) -> None:
    (folder / "dog" / "notes.txt").touch()
    (folder / "dog" / ".DS_Store").touch()
    (folder / "dog" / "album.png").mkdir()
    assert load(folder).report[-1] == "1 other files ignored, the first is notes.txt"


def test_val_without_train_is_refused(folder: Path) -> None:
    (folder / "dog").rename(folder / "val")
    with pytest.raises(UserError, match=r"has \['val'\] and beside them \['cat', 'eel'\]: expected one sub-folder"):
        load(folder)


def test_class_beside_train_is_refused(folder: Path) -> None:
    shutil.copytree(folder, folder / "train")
    with pytest.raises(UserError, match=r"has \['train'\] and beside them \['cat', 'dog', 'eel'\]"):
        load(folder)


def test_split_without_images_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "split" / "train")
    (tmp_path / "split" / "val" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=r"val holds no image. Add some, or remove the folder to have the split cut"):
        load(tmp_path / "split")


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no image"):
        load(tmp_path / "empty")


@pytest.mark.parametrize(("color", "channels"), [(True, 3), (False, 1)])
def test_color_chooses_the_channels_of_a_folder(folder: Path, color: bool, channels: int) -> None:
    datamodule = DataModule(source=str(folder), color=color, val_fraction=0.2, test_fraction=0.2)
    datamodule.setup("fit")
    assert datamodule.input_spec["shape"] == [channels, 64, 64]


# Files that can't be used


def test_bad_file_stops_by_name(folder: Path) -> None:
    (folder / "dog" / "3.bmp").write_bytes(b"")
    with pytest.raises(DataFaults, match="1 to put right before training:\ndog/3.bmp: the file is empty"):
        set_up(folder, val_fraction=0.3, test_fraction=0.3)


def test_bad_file_can_be_skipped_and_is_listed_with_the_run(folder: Path) -> None:
    (folder / "dog" / "3.bmp").write_bytes(b"")
    datamodule = set_up(folder, val_fraction=0.3, test_fraction=0.3, on_bad_file="skip")
    assert (datamodule.documents["left_out.txt"], sum(len(split) for split in datamodule.splits.values())) == (
        b"dog/3.bmp: the file is empty",
        17,
    )


def test_another_list_of_skipped_files_has_another_hash(folder: Path) -> None:
    hashes = []
    for name in ("3.bmp", "4.bmp"):
        (folder / "dog" / name).write_bytes(b"")
        datamodule = set_up(folder, val_fraction=0.4, test_fraction=0.4, on_bad_file="skip")
        hashes.append(datamodule.fingerprint["left_out_hash"])
    assert len(set(hashes)) == 2


def test_other_ways_with_bad_files_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="data.on_bad_file is 'ignore', expected stop or skip"):
        set_up(folder, on_bad_file="ignore")


# CSV files


def test_column_label_gives_one_class_to_each_file(folder: Path) -> None:
    source = load(write_csv(folder, "file,label\ncat/0.bmp,Katze\neel/0.bmp,Aal\n"))
    assert (source.classes, source.labels.tolist(), shades(source)) == (["Aal", "Katze"], [1, 0], [160, 0])


def test_column_labels_gives_any_number_of_labels(folder: Path) -> None:
    source = load(write_csv(folder, "file,labels\ncat/0.bmp,wet; furry\neel/0.bmp,wet\ndog/0.bmp,\n"))
    assert (source.classes, source.labels.tolist()) == (["furry", "wet"], [[1, 1], [0, 1], [0, 0]])


def test_columns_of_0_and_1_are_the_labels(folder: Path) -> None:
    source = load(write_csv(folder, "file,wet,furry\ncat/0.bmp,1,1\neel/0.bmp,1,0\ndog/0.bmp,0,0\n"))
    assert (source.classes, source.labels.tolist()) == (["wet", "furry"], [[1, 1], [1, 0], [0, 0]])


def test_several_labels_make_the_task_multilabel(folder: Path) -> None:
    rows = [f"{name}/{index}.bmp,{int(index > 2)},{int(name == 'cat')}" for name in SHADES for index in range(6)]
    datamodule = set_up(write_csv(folder, "\n".join(["file,late,furry", *rows])), val_fraction=0.3, test_fraction=0.3)
    batch = datamodule.splits["train"].__getitems__([0, 1])[1]
    assert (datamodule.task, batch.dtype, tuple(batch.shape)) == ("multilabel", torch.float32, (2, 2))


def test_splits_of_a_csv_are_kept(folder: Path) -> None:
    text = "file,label,split\ncat/0.bmp,a,train\neel/0.bmp,b,\ndog/0.bmp,a,val\ndog/1.bmp,b,test\n"
    splits = {name: rows.tolist() for name, rows in load(write_csv(folder, text)).splits.items()}
    assert splits == {"train": [0, 1], "val": [2], "test": [3]}


def test_group_column_is_read(folder: Path) -> None:
    text = "file,label,group\ncat/0.bmp,a,patient 1\neel/0.bmp,b,\n"
    assert load(write_csv(folder, text)).groups == ["patient 1", "eel/0.bmp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\nx,a\n", r"has the columns \['name', 'label'\]: expected `file` and either `label`"),
        ("file\nx\n", "expected `file` and either `label`"),
        ("file,label,wet\nx,a,1\n", "expected `file` and either `label`"),
        ("file,wet,furry\nx,1,yes\n", "line 2: furry is 'yes', expected 0 or 1"),
        ("file,wet,furry\nx,1\n", "line 2: furry is None, expected 0 or 1"),
        ("file,label,split\nx,a,valid\n", "line 2: split 'valid' of 'x', expected one of"),
        ("file,label\n", "holds no training image"),
    ],
)
def test_csv_that_can_not_be_read_is_named_with_its_line(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(write_csv(folder, text))


def test_missing_file_of_a_csv_is_named(folder: Path) -> None:
    source = load(write_csv(folder, "file,label\ncat/0.bmp,a\neel/0.bmp,b\ngone.bmp,b\n"))
    assert source.left_out == {"gone.bmp": "can't be read: No such file or directory"}


# Groups


def test_pattern_finds_the_group_in_the_path(folder: Path) -> None:
    assert load(folder, group=r"(\d)\.bmp").groups == ["0", "1", "2", "3", "4", "5"] * 3


def test_pattern_without_a_group_of_its_own_is_taken_whole(folder: Path) -> None:
    assert set(load(folder, group="cat|dog|eel").groups or []) == set(SHADES)


def test_file_without_a_group_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data.group 'cat\|dog' finds no group in 6 files, the first is .*eel/0.bmp"):
        load(folder, group="cat|dog")


def test_pattern_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="which is no regular expression"):
        load(folder, group="(")


# Hashes and tables


def test_data_hash_is_the_same_for_a_copy_elsewhere(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert load(copy).data_hash == load(folder).data_hash == load(folder).data_hash


def test_data_hash_changes_with_one_byte_of_one_image(folder: Path) -> None:
    before = load(folder).data_hash
    change_last_byte(folder / "dog" / "3.bmp")
    assert load(folder).data_hash != before


def test_data_hash_changes_when_an_image_moves_to_another_class(folder: Path) -> None:
    before = load(folder).data_hash
    (folder / "dog" / "0.bmp").rename(folder / "cat" / "9.bmp")  # the last cat in place of the first dog: equal order
    assert load(folder).data_hash != before


def test_data_hash_changes_with_a_label_of_a_csv(folder: Path) -> None:
    before = load(write_csv(folder, "file,labels\ncat/0.bmp,wet;furry\neel/0.bmp,wet\n")).data_hash
    assert load(write_csv(folder, "file,labels\ncat/0.bmp,wet;furry\neel/0.bmp,furry\n")).data_hash != before


def test_split_is_kept_as_a_table(cut_folder: Path) -> None:
    table = set_up(cut_folder).documents["split.csv"].decode().splitlines()
    assert (len(table), table[0], table[1], table[-1]) == (
        23,
        "sample,split,labels",
        "train/cat/0.bmp,train,cat",
        "test/dog/x.bmp,test,dog",
    )


def test_balance_makes_rare_classes_count_as_much_as_frequent_ones() -> None:
    source = Source(np.zeros(0), np.array([0, 0, 0, 1]), ["a", "b"], 8, "", {}, [], [])
    assert source.balance(np.arange(4)) == pytest.approx([4 / 6, 2])


def test_balance_of_several_labels_is_without_over_with() -> None:
    source = Source(np.zeros(0), np.array([[1, 0], [1, 0], [1, 1], [0, 0]]), ["a", "b"], 8, "", {}, [], [])
    assert source.balance(np.arange(4)) == pytest.approx([1 / 3, 3])


# Data sets in memory


def test_digits_span_the_whole_range_of_uint8() -> None:
    images = digits().images
    assert (images.dtype, images.min().item(), images.max().item()) == (torch.uint8, 0, 255)


def test_data_hash_of_digits_is_the_same_at_every_call() -> None:
    assert digits().data_hash == digits().data_hash


def write_mnist(root: Path, count: dict[str, int]) -> None:
    """The format that the real files have, each image with its own shade."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    shade = 0
    for prefix, number in count.items():
        pixels = b"".join(bytes([shade + index]) * 784 for index in range(number))
        shade += number - 1  # the last one of train is the first one of test
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, number, 28, 28) + pixels)
        labels = bytes(index % 10 for index in range(number))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, number) + labels)


def test_torchvision_set_keeps_its_own_test_split(tmp_path: Path) -> None:
    write_mnist(tmp_path, {"train": 4, "t10k": 3})
    source = torchvision_set("mnist", tmp_path)
    labels = {name: source.labels[rows].tolist() for name, rows in source.splits.items()}
    assert (labels, source.images.shape) == ({"train": [0, 1, 2, 3], "test": [0, 1, 2]}, (7, 28, 28, 1))


def test_picture_in_two_splits_of_a_published_set_is_warned_of(tmp_path: Path) -> None:
    write_mnist(tmp_path, {"train": 100, "t10k": 30})
    datamodule = DataModule(source="mnist", data_dir=str(tmp_path), val_fraction=0.2)
    datamodule.setup("fit")
    split = "val" if 99 in datamodule.splits["val"].rows else "train"
    pair = f"sample 99 ({split}) = sample 100 (test): the same picture in two splits"
    assert datamodule.report == [f"warning: 1 pictures are in two splits, e.g. {pair}"]


def test_data_set_that_can_not_be_downloaded_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there: as good as no network
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(UserError, match="cifar10 is not in .* and can't be downloaded .*use --data.source digits"):
        torchvision_set("cifar10", tmp_path)
