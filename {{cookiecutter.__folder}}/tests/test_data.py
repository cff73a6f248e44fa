"""Splits, loaders, augmentation, and the sharing out between devices."""

import os
from collections.abc import Callable
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }}.augment import augment, shift
from {{ cookiecutter.package_name }}.data import ImageData, choose_num_workers
from {{ cookiecutter.package_name }}.sources import Source
from {{ cookiecutter.package_name }}.task import ClassificationTask


class Recorder(L.Callback):
    """Keeps what the network is given: batches (images, labels) by split."""

    def __init__(self) -> None:
        self.batches: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "val": [], "test": []}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.batches["train"].append(batch)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        self.batches["val"].append(batch)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        self.batches["test"].append(batch)

    def images(self, split: str) -> Tensor:
        return torch.cat([images for images, _ in self.batches[split]])

    def labels(self, split: str) -> list[int]:
        return torch.cat([labels for _, labels in self.batches[split]]).tolist()


@pytest.fixture
def record(make_trainer: Callable[..., L.Trainer]) -> Callable[..., Recorder]:
    """`record(datamodule, epochs)` fits, then tests, and returns what the network was given."""

    def run(datamodule: ImageData, epochs: int = 1) -> Recorder:
        recorder, task = Recorder(), ClassificationTask(width=1)
        trainer = make_trainer(max_epochs=epochs, num_sanity_val_steps=0, callbacks=[recorder])
        trainer.fit(task, datamodule=datamodule)
        trainer.test(task, datamodule=datamodule, verbose=False)
        return recorder

    return run


@pytest.fixture
def numbered() -> ImageData:
    """48 training, 19 validation and 9 test samples, each with its own number in the place of its label."""
    datamodule = ImageData(batch_size=8)
    rows = {"train": np.arange(48), "val": np.arange(48, 67), "test": np.arange(67, 76)}
    images = torch.arange(76, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous()
    datamodule.adopt(Source(images, np.arange(76), ["a", "b"], "hash", rows))
    return datamodule


@pytest.fixture
def share(make_trainer: Callable[..., L.Trainer], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """`share(datamodule, "val", rank)` is what the process of that rank out of two gets of a split."""

    def run(datamodule: ImageData, split: str, rank: int) -> list[int]:
        monkeypatch.setattr(rank_zero_only, "rank", 0)  # a Trainer sets it, for the whole process
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        datamodule.trainer = make_trainer(max_epochs=1, devices=2, strategy="ddp")
        return [label for _, labels in datamodule.loader(split) for label in labels.tolist()]

    return run


def numbers(loader) -> list[int]:
    return [number for _, labels in loader for number in labels.tolist()]


# Splits


def test_splits_are_disjoint_and_complete(digits: ImageData) -> None:
    rows = np.concatenate([split.rows for split in digits.splits.values()])
    assert sorted(rows.tolist()) == list(range(1797))


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_split_holds_its_share_of_each_class(digits: ImageData, name: str) -> None:
    split = digits.splits[name]
    counts = torch.bincount(split.labels[split.rows], minlength=10)
    expected = torch.bincount(split.labels, minlength=10) * len(split) / 1797
    assert (counts - expected).abs().max() <= 1.5


def test_split_is_the_same_at_every_call(digits: ImageData) -> None:
    again = ImageData()
    again.setup("fit")
    assert again.fingerprint == digits.fingerprint


def test_split_does_not_depend_on_seed(digits: ImageData) -> None:
    other = ImageData(seed=7)
    other.setup("fit")
    assert other.splits["val"].rows.tolist() == digits.splits["val"].rows.tolist()


def test_split_does_not_depend_on_global_random_state(digits: ImageData) -> None:
    L.seed_everything(7, verbose=False)
    other = ImageData()
    other.setup("fit")
    assert other.splits["test"].rows.tolist() == digits.splits["test"].rows.tolist()


def test_another_split_seed_gives_another_split(digits: ImageData) -> None:
    other = ImageData(split_seed=7)
    other.setup("fit")
    assert other.splits["val"].rows.tolist() != digits.splits["val"].rows.tolist()


def test_another_split_changes_the_split_hash_alone(digits: ImageData) -> None:
    other = ImageData(split_seed=7)
    other.setup("fit")
    assert {key for key, value in other.fingerprint.items() if value != digits.fingerprint[key]} == {"split_hash"}


def test_statistics_are_those_of_the_training_split_alone(digits: ImageData) -> None:
    split = digits.splits["train"]
    values = split.images[split.rows].numpy() / 255
    assert digits.input_spec["mean"] + digits.input_spec["std"] == pytest.approx(
        [values.mean(), values.std()], rel=1e-4
    )


def test_unused_channel_is_not_divided_by_zero() -> None:
    datamodule = ImageData()
    rows = dict.fromkeys(("train", "val", "test"), np.arange(4))
    datamodule.adopt(Source(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), np.zeros(4, dtype=int), ["a"], "hash", rows))
    assert datamodule.input_spec["std"] == pytest.approx([1e-3])


def test_image_size_resizes_a_data_set_in_memory() -> None:
    datamodule = ImageData(image_size=12)
    datamodule.setup("fit")
    assert datamodule.input_spec["shape"] == [1, 12, 12]


def test_setup_loads_once(digits: ImageData) -> None:
    before = digits.splits["train"].images
    digits.setup("test")
    assert digits.splits["train"].images is before


def test_unknown_source_is_refused() -> None:
    with pytest.raises(
        UserError, match="data.source is 'digit'; expected a folder that exists, or one of: digits, mnist"
    ):
        ImageData(source="digit").setup("fit")


# Loaders


def test_batches_are_uint8_images_and_int64_labels(digits: ImageData) -> None:
    images, labels = next(iter(digits.train_dataloader()))
    assert (images.dtype, tuple(images.shape), labels.dtype) == (torch.uint8, (256, 1, 8, 8), torch.int64)


def test_images_stay_with_their_labels(numbered: ImageData) -> None:
    images, labels = next(iter(numbered.train_dataloader()))
    assert images[:, 0, 0, 0].tolist() == labels.tolist()


@pytest.mark.parametrize(("split", "expected"), [("val", range(48, 67)), ("test", range(67, 76))])
def test_evaluation_yields_every_sample_once_and_in_order(numbered: ImageData, split: str, expected: range) -> None:
    assert numbers(numbered.loader(split)) == list(expected)


def test_training_yields_every_sample_once_but_the_last_incomplete_batch(numbered: ImageData) -> None:
    numbered.hparams["batch_size"] = 10
    seen = numbers(numbered.train_dataloader())
    assert (len(seen), len(set(seen))) == (40, 40)


def test_training_order_is_shuffled(numbered: ImageData) -> None:
    seen = numbers(numbered.train_dataloader())
    assert seen != sorted(seen)


def test_training_order_depends_on_seed(numbered: ImageData) -> None:
    first = numbers(numbered.train_dataloader())
    numbered.hparams["seed"] = 7
    assert numbers(numbered.train_dataloader()) != first


def test_training_order_does_not_depend_on_global_random_state(numbered: ImageData) -> None:
    first = numbers(numbered.train_dataloader())
    torch.manual_seed(7)
    assert numbers(numbered.train_dataloader()) == first


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_order_differs_between_epochs(record: Callable[..., Recorder], num_workers: int) -> None:
    labels = record(ImageData(batch_size=256, num_workers=num_workers), epochs=3).labels("train")
    epochs = {tuple(labels[start : start + 1280]) for start in (0, 1280, 2560)}
    assert len(epochs) == 3


def test_training_order_does_not_depend_on_num_workers(record: Callable[..., Recorder]) -> None:
    without, with_workers = (
        record(ImageData(batch_size=256, num_workers=count), epochs=2).labels("train") for count in (0, 2)
    )
    assert without == with_workers


def test_batch_that_exceeds_the_training_split_is_refused(numbered: ImageData) -> None:
    numbered.hparams["batch_size"] = 49
    with pytest.raises(UserError, match=r"48 training images for 1 device\(s\) are fewer than a batch of 49"):
        numbered.train_dataloader()


def test_batch_that_exceeds_a_devices_share_is_refused(numbered: ImageData, share: Callable[..., list[int]]) -> None:
    numbered.hparams["batch_size"] = 25
    with pytest.raises(UserError, match=r"48 training images for 2 device\(s\)"):
        share(numbered, "train", rank=0)


@pytest.mark.parametrize(("split", "expected"), [("val", range(48, 67)), ("test", range(67, 76))])
def test_two_devices_share_evaluation_without_gap_or_overlap(
    numbered: ImageData, share: Callable[..., list[int]], split: str, expected: range
) -> None:
    shares = [share(numbered, split, rank=1), share(numbered, split, rank=0)]
    assert sorted(shares[0] + shares[1]) == list(expected)


def test_two_devices_share_training_without_gap_or_overlap(
    numbered: ImageData, share: Callable[..., list[int]]
) -> None:
    shares = [share(numbered, "train", rank=1), share(numbered, "train", rank=0)]
    assert sorted(shares[0] + shares[1]) == list(range(48))


def test_two_devices_never_train_on_a_sample_twice(numbered: ImageData, share: Callable[..., list[int]]) -> None:
    numbered.splits["train"].rows = numbered.splits["train"].rows[:47]  # one more would make two whole shares
    seen = share(numbered, "train", rank=1) + share(numbered, "train", rank=0)
    assert len(set(seen)) == len(seen) == 32


def test_two_devices_train_on_equally_many_batches(numbered: ImageData, share: Callable[..., list[int]]) -> None:
    numbered.splits["train"].rows = numbered.splits["train"].rows[:45]  # 23 and 22 samples
    shares = [share(numbered, "train", rank=1), share(numbered, "train", rank=0)]
    assert [len(items) for items in shares] == [16, 16]


def test_data_in_memory_is_loaded_without_workers() -> None:
    assert choose_num_workers(in_memory=True) == 0


def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = choose_num_workers(in_memory=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(os.cpu_count()))
    assert 0 <= choose_num_workers(in_memory=False) <= 1 <= alone <= 8


# Augmentation


def test_training_images_are_augmented(digits: ImageData, record: Callable[..., Recorder]) -> None:
    originals = {image.numpy().tobytes() for image in digits.splits["train"].images}
    seen = record(digits).images("train")
    changed = sum(image.numpy().tobytes() not in originals for image in seen)
    assert changed / len(seen) > 0.5


@pytest.mark.parametrize("name", ["val", "test"])
def test_val_and_test_images_are_not_augmented(digits: ImageData, record: Callable[..., Recorder], name: str) -> None:
    split = digits.splits[name]
    assert torch.equal(record(digits).images(name), split.images[split.rows])


def test_augmentation_differs_between_epochs(record: Callable[..., Recorder]) -> None:
    images = record(ImageData(batch_size=1297), epochs=2).images("train").flatten(1)
    first, second = (sorted(map(bytes, part.numpy())) for part in images.split(1297))
    assert first != second


def test_each_sample_is_shifted_by_its_own_offset() -> None:
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    shifted = augment(image.expand(200, -1, -1, -1), max_shift=1)
    assert len(shifted.flatten(1).unique(dim=0)) == 9


def test_shift_moves_an_image_along_both_axes_and_fills_with_zero() -> None:
    images = torch.zeros(500, 2, 5, 5, dtype=torch.uint8)
    images[:, :, 2, 2] = 9
    places = {tuple(place) for place in (shift(images, 2)[:, 1] == 9).nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in range(5) for column in range(5)}


def test_shift_keeps_an_image_as_it_is_but_for_its_place() -> None:
    images = torch.zeros(50, 3, 8, 8, dtype=torch.uint8)
    images[:, :, 2:6, 2:6] = torch.randint(1, 256, (50, 3, 4, 4), dtype=torch.uint8)
    kept = [shifted[shifted > 0].tolist() for shifted in shift(images, 2)]
    assert kept == [image[image > 0].tolist() for image in images]


def test_shift_by_no_pixel_changes_nothing() -> None:
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(shift(images, 0), images)


# Prediction


def test_predict_without_a_folder_is_refused() -> None:
    with pytest.raises(UserError, match="predict needs a folder with images, found none in None"):
        ImageData().setup("predict")


def test_predict_on_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match="found none in"):
        ImageData(predict_dir=str(tmp_path)).setup("predict")


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_for_cuda_are_pinned(digits: ImageData, make_trainer: Callable[..., L.Trainer]) -> None:
    digits.trainer = make_trainer(max_epochs=1, accelerator="cuda")
    images, _ = next(iter(digits.train_dataloader()))
    assert images.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_images_are_augmented_on_the_device_that_trains(make_trainer: Callable[..., L.Trainer]) -> None:
    recorder = Recorder()
    trainer = make_trainer(max_epochs=1, accelerator="cuda", callbacks=[recorder])
    trainer.fit(ClassificationTask(width=1), datamodule=ImageData(batch_size=256))
    assert recorder.images("train").device.type == "cuda"


# Options


@pytest.mark.parametrize(
    ("option", "value"), [("batch_size", 0), ("image_size", -3), ("num_workers", -1), ("max_shift", -1)]
)
def test_option_outside_its_range_is_refused(option: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"data\.{option} is {value}, expected .* Change --data\.{option}"):
        ImageData(**{option: value}).setup("fit")
