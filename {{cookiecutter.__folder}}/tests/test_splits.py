"""How splits are cut, what stays together, and what is found in two of them."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from {{ cookiecutter.package_name }} import DataFaults, UserError
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.splits import belonging, cut, equal_pairs, near_pairs

ALONE = np.arange(1000)


def picture(path: Path, seed: int, **options) -> Path:
    """A smooth picture of 64x64 pixels, another one for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    Image.fromarray(cells).resize((64, 64), Image.Resampling.BICUBIC).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of eight pictures in train/, two each in val/ and test/."""
    seed = 0
    for split, count in (("train", 8), ("val", 2), ("test", 2)):
        for name in ("cat", "dog"):
            for index in range(count):
                picture(tmp_path / "photos" / split / name / f"p{seed // 2}_{index}.png", seed)
                seed += 1
    return tmp_path / "photos"


def set_up(folder: Path, **options) -> DataModule:
    datamodule = DataModule(source=str(folder), **options)
    datamodule.setup("fit")
    return datamodule


# Cutting


def test_share_of_each_class_is_cut() -> None:
    labels = np.repeat([0, 1, 2], [700, 200, 100])
    taken = cut(np.arange(1000), labels, ALONE, 0.1, seed=1)
    assert np.bincount(labels[taken]).tolist() == [70, 20, 10]


def test_groups_are_never_parted() -> None:
    random = np.random.default_rng(0)
    groups, labels = random.integers(0, 60, 1000), random.integers(0, 3, 1000)
    taken = cut(np.arange(1000), labels, groups, 0.2, seed=1)
    assert set(groups[taken]).isdisjoint(groups[np.setdiff1d(np.arange(1000), taken)])


def test_groups_are_shared_out_by_class() -> None:
    random = np.random.default_rng(0)
    groups = random.integers(0, 100, 1000)
    labels = (groups % 4 == 0).astype(np.int64)  # a quarter of the groups is of the rare class
    taken = cut(np.arange(1000), labels, groups, 0.2, seed=1)
    assert np.bincount(labels[taken]) / np.bincount(labels) == pytest.approx([0.2, 0.2], abs=0.04)


def test_share_of_each_label_is_cut_where_samples_have_several() -> None:
    labels = (np.random.default_rng(0).random((1000, 4)) < [0.5, 0.2, 0.05, 0.01]).astype(np.uint8)
    taken = cut(np.arange(1000), labels, ALONE, 0.2, seed=1)
    assert labels[taken].sum(axis=0) / labels.sum(axis=0) == pytest.approx([0.2] * 4, abs=0.08)
    assert len(taken) == pytest.approx(200, abs=10)


def test_cut_depends_on_the_seed_alone() -> None:
    labels, groups = np.arange(1000) % 3, np.arange(1000) // 5
    one, again, other = (cut(np.arange(1000), labels, groups, 0.2, seed).tolist() for seed in (1, 1, 2))
    assert one == again != other


def test_only_the_given_samples_are_cut() -> None:
    train = np.arange(0, 1000, 2)
    assert set(cut(train, np.arange(1000) // 500, np.arange(1000) // 4, 0.2, seed=1)) < set(train.tolist())


@pytest.mark.parametrize("groups", [ALONE[:9], np.array([0, 0, 0, 1, 2, 3, 4, 5, 6])])
def test_class_that_can_not_be_in_both_is_refused(groups: np.ndarray) -> None:
    labels = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0]) if groups[2] == 0 else np.array([1, 0, 0, 0, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="least populated class|all samples belong together"):
        cut(np.arange(9), labels, groups, 0.34, seed=1)


def test_class_too_small_to_be_split_is_named(tmp_path: Path) -> None:
    for index in range(12):
        picture(tmp_path / ("cat" if index else "dog") / f"{index}.png", index)
    with pytest.raises(UserError, match="No test split of 15% can be cut from .*'dog': 1.*--data.test_fraction"):
        set_up(tmp_path)


def test_samples_of_one_group_or_with_equal_pixels_belong_together() -> None:
    units = belonging(["a", "b", "a", "c", "d"], ["k", "l", "m", "l", "n"]).tolist()
    assert (units[0] == units[2], units[1] == units[3], len(set(units))) == (True, True, 3)


def test_groups_that_share_a_picture_belong_together() -> None:
    assert len(set(belonging(["a", "b", "b", "c"], ["k", "k", "l", "m"]).tolist())) == 2


def test_what_we_cut_parts_neither_groups_nor_copies(tmp_path: Path) -> None:
    for index in range(60):
        name = "cat" if index % 2 else "dog"
        picture(tmp_path / name / f"video{index // 4}_{index}.png", index if index < 40 else index - 40)
    datamodule = set_up(tmp_path, group=r"video\d+", val_fraction=0.25, test_fraction=0.25)
    assert (datamodule.faults, all(len(split) > 5 for split in datamodule.splits.values())) == ([], True)


# Leaks


def test_pairs_are_found_across_splits_alone() -> None:
    splits = {"train": np.array([0, 1, 2]), "val": np.array([3, 4]), "test": np.array([5])}
    assert equal_pairs(["a", "a", "b", "b", "c", "b"], splits) == [(2, 3), (2, 5), (3, 5)]


def test_distinct_pictures_are_no_leak(folder: Path) -> None:
    assert set_up(folder).report == ["24 files, 24 usable"]


@pytest.mark.parametrize("name", ["val/dog/copy.png", "test/cat/copy.png"])
def test_copy_in_another_split_is_a_fault(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / "train" / "cat" / "p0_0.png").read_bytes())
    pair = f"train/cat/p0_0.png (train) = {name} ({name.split('/')[0]}): the same picture in two splits"
    with pytest.raises(DataFaults, match=re.escape(f"1 to put right before training:\n{pair}")):
        set_up(folder)


def test_copy_in_another_format_is_a_fault(folder: Path) -> None:
    picture(folder / "val" / "dog" / "copy.bmp", 0)
    with pytest.raises(DataFaults, match=r"p0_0.png \(train\) = val/dog/copy.bmp \(val\): the same picture"):
        set_up(folder)


def test_copy_in_the_same_split_is_no_fault(folder: Path) -> None:
    picture(folder / "train" / "cat" / "copy.png", 0)
    assert set_up(folder).faults == []


def test_picture_saved_again_in_another_quality_is_warned_of(folder: Path) -> None:
    picture(folder / "val" / "dog" / "again.jpg", 0, quality=60)
    assert set_up(folder).report[1:] == [
        "warning: train/cat/p0_0.png (train) looks much like val/dog/again.jpg (val)",
    ]


def test_group_in_two_splits_is_a_fault(folder: Path) -> None:
    picture(folder / "val" / "dog" / "p0_9.png", 99)
    with pytest.raises(DataFaults, match=r"train/cat/p0_0.png \(train\), val/dog/p0_9.png \(val\): both of group p0"):
        set_up(folder, group=r"(p\d+)_")


def test_near_pairs_differ_in_at_most_three_bits() -> None:
    base = 0x0123456789ABCDEF
    hashes = np.array([base, base ^ 0b111, base ^ 0b1111, base ^ (1 << 63 | 1 << 40 | 1)], dtype=np.uint64)
    assert near_pairs(hashes, {"train": np.array([0]), "val": np.array([1, 2, 3])}) == [(0, 1), (0, 3)]


def test_plain_pictures_are_not_compared() -> None:
    assert near_pairs(np.zeros(2, np.uint64), {"train": np.array([0]), "val": np.array([1])}) == []


def test_a_thousand_distinct_pictures_give_no_pair(tmp_path: Path) -> None:
    from {{ cookiecutter.package_name }}.scan import difference_hash

    random = np.random.default_rng(0)
    hashes = np.zeros(1000, np.uint64)
    for row in range(1000):
        cells = Image.fromarray(random.integers(0, 256, (6, 6, 3), np.uint8))
        hashes[row] = difference_hash(np.asarray(cells.resize((64, 64), Image.Resampling.BICUBIC)))
    assert near_pairs(hashes, {"train": np.arange(800), "val": np.arange(800, 1000)}) == []
