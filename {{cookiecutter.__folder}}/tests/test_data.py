"""Splits, loaders, augmentation, and the sharing out between devices."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }}.augment import OFF
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.images import Files, Stored
from {{ cookiecutter.package_name }}.loader import ImageSet, choose_num_workers
from {{ cookiecutter.package_name }}.order import sample_weights
from {{ cookiecutter.package_name }}.sources import Source
from {{ cookiecutter.package_name }}.task import ClassificationTask

FILES, STORED = Files([], "L", (0, 8, 8, 1)), Stored(Path(), np.zeros(0), (0, 8, 8, 1))


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

    def run(datamodule: DataModule, epochs: int = 1) -> Recorder:
        recorder, task = Recorder(), ClassificationTask(width=1)
        trainer = make_trainer(max_epochs=epochs, num_sanity_val_steps=0, callbacks=[recorder])
        trainer.fit(task, datamodule=datamodule)
        trainer.test(task, datamodule=datamodule, verbose=False)
        return recorder

    return run


def adopted(datamodule: DataModule, images: Tensor, labels: np.ndarray, rows: dict[str, np.ndarray]) -> DataModule:
    """The data module, with the given data in the place of its own."""
    datamodule.augmentation = {**OFF}
    names = [str(row) for row in range(len(labels))]
    datamodule.adopt(Source(images, labels, [str(label) for label in range(76)], 8, "hash", rows, names, names))
    return datamodule


@pytest.fixture
def numbered() -> DataModule:
    """48 training, 19 validation and 9 test samples, each with its own number in the place of its label."""
    rows = {"train": np.arange(48), "val": np.arange(48, 67), "test": np.arange(67, 76)}
    images = torch.arange(76, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 1).contiguous()
    return adopted(DataModule(batch_size=8), images, np.arange(76), rows)


@pytest.fixture
def share(make_trainer: Callable[..., L.Trainer], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """`share(datamodule, "val", rank)` is what the process of that rank out of two gets of a split."""

    def run(datamodule: DataModule, split: str, rank: int) -> list[int]:
        monkeypatch.setattr(rank_zero_only, "rank", 0)  # a Trainer sets it, for the whole process
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        datamodule.trainer = make_trainer(max_epochs=1, devices=2, strategy="ddp")
        return [label for _, labels in datamodule.loader(split) for label in labels.tolist()]

    return run


def numbers(loader) -> list[int]:
    return [number for _, labels in loader for number in labels.tolist()]


# Splits


def test_splits_are_disjoint_and_complete(digits: DataModule) -> None:
    rows = np.concatenate([split.rows for split in digits.splits.values()])
    assert sorted(rows.tolist()) == list(range(1797))


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_split_holds_its_share_of_each_class(digits: DataModule, name: str) -> None:
    split = digits.splits[name]
    counts = torch.bincount(split.labels[split.rows], minlength=10)
    expected = torch.bincount(split.labels, minlength=10) * len(split) / 1797
    assert (counts - expected).abs().max() <= 1.5


def test_split_is_the_same_at_every_call(digits: DataModule) -> None:
    again = DataModule()
    again.setup("fit")
    assert again.fingerprint == digits.fingerprint


def test_split_does_not_depend_on_seed(digits: DataModule) -> None:
    other = DataModule(seed=7)
    other.setup("fit")
    assert other.splits["val"].rows.tolist() == digits.splits["val"].rows.tolist()


def test_split_does_not_depend_on_global_random_state(digits: DataModule) -> None:
    L.seed_everything(7, verbose=False)
    other = DataModule()
    other.setup("fit")
    assert other.splits["test"].rows.tolist() == digits.splits["test"].rows.tolist()


def test_another_split_seed_gives_another_split(digits: DataModule) -> None:
    other = DataModule(split_seed=7)
    other.setup("fit")
    assert other.splits["val"].rows.tolist() != digits.splits["val"].rows.tolist()


def test_another_split_changes_the_split_hash_alone(digits: DataModule) -> None:
    other = DataModule(split_seed=7)
    other.setup("fit")
    assert {key for key, value in other.fingerprint.items() if value != digits.fingerprint[key]} == {"split_hash"}


def test_statistics_are_those_of_the_training_split_alone(digits: DataModule) -> None:
    split = digits.splits["train"]
    values = split.images[split.rows].numpy() / 255  # fewer than are looked at in a larger split
    assert digits.input_spec["mean"] + digits.input_spec["std"] == pytest.approx(
        [values.mean(), values.std()], rel=1e-4
    )


def test_unused_channel_is_not_divided_by_zero() -> None:
    rows = dict.fromkeys(("train", "val", "test"), np.arange(4))
    datamodule = adopted(DataModule(), torch.zeros(4, 8, 8, 1, dtype=torch.uint8), np.zeros(4, dtype=int), rows)
    assert datamodule.input_spec["std"] == pytest.approx([1e-3])


def test_image_size_resizes_a_data_set_in_memory() -> None:
    datamodule = DataModule(image_size=12)
    datamodule.setup("fit")
    assert datamodule.input_spec["shape"] == [1, 12, 12]


def test_setup_loads_once(digits: DataModule) -> None:
    before = digits.splits["train"].images
    digits.setup("test")
    assert digits.splits["train"].images is before


def test_unknown_source_is_refused() -> None:
    with pytest.raises(
        UserError, match="data.source is 'digit'; expected a folder or a CSV that exists, or one of: digits, mnist"
    ):
        DataModule(source="digit").setup("fit")


# Loaders


def test_batches_are_uint8_images_and_int64_labels(digits: DataModule) -> None:
    images, labels = next(iter(digits.train_dataloader()))
    assert (images.dtype, tuple(images.shape), labels.dtype) == (torch.uint8, (256, 1, 8, 8), torch.int64)


def test_images_stay_with_their_labels(numbered: DataModule) -> None:
    images, labels = next(iter(numbered.train_dataloader()))
    assert images[:, 0, 0, 0].tolist() == labels.tolist()


@pytest.mark.parametrize(("split", "expected"), [("val", range(48, 67)), ("test", range(67, 76))])
def test_evaluation_yields_every_sample_once_and_in_order(numbered: DataModule, split: str, expected: range) -> None:
    assert numbers(numbered.loader(split)) == list(expected)


def test_training_yields_every_sample_once_but_the_last_incomplete_batch(numbered: DataModule) -> None:
    numbered.hparams["batch_size"] = 10
    seen = numbers(numbered.train_dataloader())
    assert (len(seen), len(set(seen))) == (40, 40)


def test_training_order_is_shuffled(numbered: DataModule) -> None:
    seen = numbers(numbered.train_dataloader())
    assert seen != sorted(seen)


def test_training_order_depends_on_seed(numbered: DataModule) -> None:
    first = numbers(numbered.train_dataloader())
    numbered.hparams["seed"] = 7
    assert numbers(numbered.train_dataloader()) != first


def test_training_order_does_not_depend_on_global_random_state(numbered: DataModule) -> None:
    first = numbers(numbered.train_dataloader())
    torch.manual_seed(7)
    assert numbers(numbered.train_dataloader()) == first


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_order_differs_between_epochs(record: Callable[..., Recorder], num_workers: int) -> None:
    labels = record(DataModule(batch_size=256, num_workers=num_workers), epochs=3).labels("train")
    epochs = {tuple(labels[start : start + 1280]) for start in (0, 1280, 2560)}
    assert len(epochs) == 3


def test_training_order_does_not_depend_on_num_workers(record: Callable[..., Recorder]) -> None:
    without, with_workers = (
        record(DataModule(batch_size=256, num_workers=count), epochs=2).labels("train") for count in (0, 2)
    )
    assert without == with_workers


def test_batch_that_exceeds_the_training_split_is_refused(numbered: DataModule) -> None:
    numbered.hparams["batch_size"] = 49
    with pytest.raises(UserError, match=r"48 training images for 1 device\(s\) are fewer than a batch of 49"):
        numbered.train_dataloader()


def test_batch_that_exceeds_a_devices_share_is_refused(numbered: DataModule, share: Callable[..., list[int]]) -> None:
    numbered.hparams["batch_size"] = 25
    with pytest.raises(UserError, match=r"48 training images for 2 device\(s\)"):
        share(numbered, "train", rank=0)


@pytest.mark.parametrize(("split", "expected"), [("val", range(48, 67)), ("test", range(67, 76))])
def test_two_devices_share_evaluation_without_gap_or_overlap(
    numbered: DataModule, share: Callable[..., list[int]], split: str, expected: range
) -> None:
    shares = [share(numbered, split, rank=1), share(numbered, split, rank=0)]
    assert sorted(shares[0] + shares[1]) == list(expected)


def test_two_devices_share_training_without_gap_or_overlap(
    numbered: DataModule, share: Callable[..., list[int]]
) -> None:
    shares = [share(numbered, "train", rank=1), share(numbered, "train", rank=0)]
    assert sorted(shares[0] + shares[1]) == list(range(48))


def test_two_devices_never_train_on_a_sample_twice(numbered: DataModule, share: Callable[..., list[int]]) -> None:
    numbered.splits["train"].rows = numbered.splits["train"].rows[:47]  # one more would make two whole shares
    seen = share(numbered, "train", rank=1) + share(numbered, "train", rank=0)
    assert len(set(seen)) == len(seen) == 32


def test_two_devices_train_on_equally_many_batches(numbered: DataModule, share: Callable[..., list[int]]) -> None:
    numbered.splits["train"].rows = numbered.splits["train"].rows[:45]  # 23 and 22 samples
    shares = [share(numbered, "train", rank=1), share(numbered, "train", rank=0)]
    assert [len(items) for items in shares] == [16, 16]


def test_images_in_memory_are_fetched_without_workers() -> None:
    assert choose_num_workers(torch.zeros(1), cuda=True) == 0


@pytest.mark.parametrize(("images", "cuda"), [(FILES, False), (FILES, True), (STORED, True)])
def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch, images: object, cuda: bool) -> None:
    alone = choose_num_workers(images, cuda)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(os.cpu_count()))
    assert 0 <= choose_num_workers(images, cuda) <= 1 <= alone <= 8


def test_stored_images_are_fetched_without_workers_by_the_processor_that_trains() -> None:
    assert choose_num_workers(STORED, cuda=False) == 0


def test_notebook_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert choose_num_workers(FILES, cuda=True) == 0


# Balance


@pytest.mark.parametrize("balanced", [True, False])
def test_balanced_training_draws_classes_equally_often(balanced: bool) -> None:
    labels = np.repeat([0, 1], [900, 100])
    rows = {"train": np.arange(1000), "val": np.arange(9), "test": np.arange(9)}
    datamodule = adopted(DataModule(balanced=balanced, batch_size=100), torch.zeros(1000, 8, 8, 1), labels, rows)
    share = sum(numbers(datamodule.train_dataloader())) / 1000
    assert share == pytest.approx(0.5 if balanced else 0.1, abs=0.06)


def test_balanced_order_depends_on_seed_and_epoch_alone(numbered: DataModule) -> None:
    numbered.hparams["balanced"] = True
    loader, again = numbered.train_dataloader(), numbered.train_dataloader()
    first = numbers(loader)
    loader.sampler.set_epoch(1)
    assert (numbers(again) == first, numbers(loader) == first) == (True, False)


def test_devices_share_a_balanced_order(numbered: DataModule, share: Callable[..., list[int]]) -> None:
    numbered.hparams["balanced"] = True
    alone = numbers(numbered.train_dataloader())
    assert [share(numbered, "train", rank) for rank in (0, 1)] == [alone[::2], alone[1::2]]


def test_rarest_label_of_a_sample_decides_how_often_it_is_drawn() -> None:
    split = ImageSet(torch.zeros(4, 8, 8, 1), np.array([[1, 0], [1, 1], [0, 0], [1, 0]], np.uint8), np.arange(4), 8)
    assert sample_weights(split, {"a": 3, "b": 1}).tolist() == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3])


# Augmentation


def test_training_images_are_augmented(digits: DataModule, record: Callable[..., Recorder]) -> None:
    originals = {image.numpy().tobytes() for image in digits.splits["train"].images}
    seen = record(digits).images("train")
    changed = sum(image.numpy().tobytes() not in originals for image in seen)
    assert changed / len(seen) > 0.5


@pytest.mark.parametrize("name", ["val", "test"])
def test_val_and_test_images_are_not_augmented(digits: DataModule, record: Callable[..., Recorder], name: str) -> None:
    split = digits.splits[name]
    assert torch.equal(record(digits).images(name), split.images[split.rows].permute(0, 3, 1, 2))


def test_augmentation_differs_between_epochs(record: Callable[..., Recorder]) -> None:
    images = record(DataModule(batch_size=1297), epochs=2).images("train").flatten(1)
    first, second = (sorted(map(bytes, part.numpy())) for part in images.split(1297))
    assert first != second


# Prediction


def test_predict_without_a_folder_is_refused() -> None:
    with pytest.raises(UserError, match="predict needs a folder with images, found none in None"):
        DataModule().setup("predict")


def test_predict_on_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match="found none in"):
        DataModule(predict_source=str(tmp_path)).setup("predict")


# On a GPU


@pytest.mark.parametrize(("accelerator", "pinned"), [(CUDAAccelerator(), True), (CPUAccelerator(), False)])
def test_loaders_for_cuda_pin_their_memory(digits: DataModule, accelerator: Any, pinned: bool) -> None:
    digits.trainer = SimpleNamespace(accelerator=accelerator, world_size=1, global_rank=0)
    assert {digits.loader(name).pin_memory for name in ("train", "val", "test")} == {pinned}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_for_cuda_are_pinned(digits: DataModule, make_trainer: Callable[..., L.Trainer]) -> None:
    digits.trainer = make_trainer(max_epochs=1, accelerator="cuda")
    images, _ = next(iter(digits.train_dataloader()))
    assert images.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_images_are_augmented_on_the_device_that_trains(make_trainer: Callable[..., L.Trainer]) -> None:
    recorder = Recorder()
    trainer = make_trainer(max_epochs=1, accelerator="cuda", callbacks=[recorder])
    trainer.fit(ClassificationTask(width=1), datamodule=DataModule(batch_size=256))
    assert recorder.images("train").device.type == "cuda"


# Options


@pytest.mark.parametrize(
    ("option", "value"), [("batch_size", 0), ("image_size", -3), ("num_workers", -1), ("max_shift", -1)]
)
def test_option_outside_its_range_is_refused(option: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"data\.{option} is {value}, expected .* Change --data\.{option}"):
        DataModule(**{option: value}).setup("fit")
