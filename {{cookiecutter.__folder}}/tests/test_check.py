"""What is looked at before the first epoch, and what it finds."""

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }} import speed as speed_module
from {{ cookiecutter.package_name }}.check import (
    check,
    check_batch,
    check_disk,
    check_gradients,
    check_labels,
    check_memory,
    check_passes,
)
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.export import OnnxExport
from {{ cookiecutter.package_name }}.images import Files
from {{ cookiecutter.package_name }}.picture import caption, picture
from {{ cookiecutter.package_name }}.registry import Registry
from {{ cookiecutter.package_name }}.speed import advice, in_words, rate, speed
from {{ cookiecutter.package_name }}.task import ClassificationTask


class Sorting(nn.Module):
    """A network that PyTorch can run and ONNX can't hold: what it does depends on the values of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.01))

    def forward(self, images: Tensor) -> Tensor:
        features = images.float().flatten(1) * self.scale
        return features[:, :10] if features.sum() > 0 else features[:, 10:20]


@pytest.fixture
def run_check(digits: DataModule, make_trainer: Callable[..., L.Trainer]) -> Callable[..., None]:
    """`run_check(callbacks)` checks the digits and an untrained task."""

    def run(*callbacks: L.Callback, **options) -> None:
        check(make_trainer(max_epochs=1, callbacks=list(callbacks)), ClassificationTask(width=4), digits, **options)

    return run


def change_labels(datamodule: DataModule, split: str, old: int, new: int) -> None:
    """In one split alone."""
    labels = datamodule.splits[split].labels.clone()
    datamodule.splits[split].labels = labels.where(labels != old, torch.tensor(new))


def faults_of(task: ClassificationTask, datamodule: DataModule, inputs: Tensor) -> list[str]:
    return check_batch(task, datamodule, "train", (inputs, torch.zeros(len(inputs), dtype=torch.int64)))


def test_sound_data_pass(run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    run_check()
    assert "check digits: 10 classes, data hash" in capsys.readouterr().out


def test_number_of_samples_of_each_split_is_printed(
    run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_check()
    assert "train   1,297 samples, 126 to 132 of each class" in capsys.readouterr().out


def test_untrained_loss_is_printed_beside_that_of_guessing(
    run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_check()
    assert capsys.readouterr().out.count("by chance 2.303") == 2


def test_label_that_has_no_class_is_refused(digits: DataModule, run_check: Callable[..., None]) -> None:
    change_labels(digits, "val", 3, 10)
    with pytest.raises(UserError, match=r"val: labels \[10\], expected 0 to 9. Correct them in sources.py"):
        run_check()


def test_negative_label_is_refused(digits: DataModule, run_check: Callable[..., None]) -> None:
    change_labels(digits, "test", 3, -1)
    with pytest.raises(UserError, match=r"test: labels \[-1\], expected 0 to 9"):
        run_check()


def test_empty_split_is_refused(digits: DataModule, run_check: Callable[..., None]) -> None:
    digits.splits["val"].rows = digits.splits["val"].rows[:0]
    with pytest.raises(UserError, match="val: the split is empty. Add samples."):
        run_check()


def test_class_without_training_sample_is_refused(digits: DataModule, run_check: Callable[..., None]) -> None:
    change_labels(digits, "train", 3, 4)
    with pytest.raises(UserError, match=r"train: no sample of \['3'\]. Add some"):
        run_check()


def test_class_without_val_sample_is_warned_of(
    digits: DataModule, run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    change_labels(digits, "val", 3, 4)
    run_check()
    assert "warning: val has no sample of ['3']; its metrics say nothing of them" in capsys.readouterr().out


def test_everything_to_put_right_is_named_at_once(digits: DataModule, run_check: Callable[..., None]) -> None:
    change_labels(digits, "train", 3, 4)
    change_labels(digits, "test", 3, 10)
    with pytest.raises(UserError, match=r"2 to put right before training:\ntrain: .*\ntest: "):
        run_check()


def test_label_faults_are_returned_in_the_order_of_the_splits(digits: DataModule) -> None:
    for split in ("train", "val", "test"):
        change_labels(digits, split, 9, 99)
    assert [fault.split(":")[0] for fault in check_labels(digits)] == ["train", "train", "val", "test"]


def test_inputs_of_another_shape_are_a_fault(task: ClassificationTask, digits: DataModule) -> None:
    (fault,) = faults_of(task, digits, torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    assert fault.startswith("train: inputs are (4, 3, 8, 8) uint8 in [0, 0], expected (B, *[1, 8, 8]) uint8")


def test_inputs_of_another_dtype_are_a_fault(task: ClassificationTask, digits: DataModule) -> None:
    (fault,) = faults_of(task, digits, torch.rand(4, 1, 8, 8))
    assert "(4, 1, 8, 8) float32" in fault


def test_inputs_that_are_not_finite_are_a_fault(task: ClassificationTask, digits: DataModule) -> None:
    digits.input_spec["dtype"] = "float32"
    inputs = torch.rand(4, 1, 8, 8)
    inputs[0, 0, 0, 0] = float("nan")
    assert faults_of(task, digits, inputs) == ["train: inputs hold NaN or infinity. See data.py."]


def test_inputs_that_are_all_alike_are_a_fault(task: ClassificationTask, digits: DataModule) -> None:
    inputs = torch.full((4, 1, 8, 8), 7, dtype=torch.uint8)
    assert faults_of(task, digits, inputs) == ["train: every input value of the batch is 7. See data.py."]


def test_untrained_loss_that_is_not_finite_is_a_fault(task: ClassificationTask, digits: DataModule) -> None:
    task.network.head[1].bias.data.fill_(float("nan"))
    inputs = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert faults_of(task, digits, inputs) == ["train: the untrained network's loss is nan. See model.py and task.py."]


def test_batch_that_exceeds_the_data_is_refused_before_training(
    digits: DataModule, run_check: Callable[..., None]
) -> None:
    digits.hparams["batch_size"] = 2000
    with pytest.raises(UserError, match="fewer than a batch of 2000"):
        run_check()


def test_batch_that_exceeds_the_data_is_named_with_everything_else(
    digits: DataModule, run_check: Callable[..., None]
) -> None:
    digits.hparams["batch_size"] = 2000
    change_labels(digits, "test", 3, 10)
    with pytest.raises(UserError, match="2 to put right before training:\ntest: labels.*\n1297 training images"):
        run_check()


@pytest.mark.parametrize(("scale", "words"), [(1.0, False), (30.0, True)])
def test_untrained_loss_far_from_chance_is_warned_of(
    task: ClassificationTask, digits: DataModule, capsys: pytest.CaptureFixture[str], scale: float, words: bool
) -> None:
    task.network.head[1].bias.data[0] = -scale  # all labels are 0
    faults_of(task, digits, torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8))
    assert ("warning: that is far from chance" in capsys.readouterr().out) is words


def test_normalized_inputs_are_described(run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    run_check()
    assert "normalized: mean -0.00, deviation 1.00" in capsys.readouterr().out


def test_statistics_of_other_data_are_a_fault(task: ClassificationTask, digits: DataModule) -> None:
    task.network.normalize.channel_mean.fill_(30.0)  # of pixels, not of their range
    (fault,) = faults_of(task, digits, torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8))
    assert fault.startswith("train: that is far from mean 0 and deviation 1")


# Several labels


def several(datamodule: DataModule, *rows: list[int]) -> DataModule:
    """The digits, with these labels again and again in the place of their own."""
    labels = torch.tensor(rows, dtype=torch.uint8).repeat(-(-1797 // len(rows)), 1)[:1797]
    datamodule.classes, datamodule.task = ["wet", "furry"], "multilabel"
    for split in datamodule.splits.values():
        split.labels = labels
    return datamodule


def test_several_labels_that_differ_are_no_fault(digits: DataModule, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_labels(several(digits, [1, 0], [0, 1])) == []
    assert "warning" not in capsys.readouterr().out


def test_label_that_every_sample_has_is_a_fault(digits: DataModule) -> None:
    faults = check_labels(several(digits, [1, 0], [1, 1]))
    assert faults[0] == "train: every sample has the labels ['wet']. Take them out: they teach nothing."


def test_label_that_no_sample_has_is_a_fault(digits: DataModule) -> None:
    faults = check_labels(several(digits, [0, 1], [0, 0]))
    assert faults[0] == "train: no sample of ['wet']. Add some, or take the class out."


@pytest.mark.parametrize(("row", "words"), [([0, 0], "no label"), ([1, 1], "every label")])
def test_rows_all_zero_or_all_one_are_warned_of(
    digits: DataModule, capsys: pytest.CaptureFixture[str], row: list[int], words: str
) -> None:
    check_labels(several(digits, [1, 0], [0, 1], row))
    assert f"samples of train have {words}" in capsys.readouterr().out


def test_labels_other_than_0_and_1_are_a_fault(digits: DataModule) -> None:
    assert "labels [2], expected" in check_labels(several(digits, [1, 0], [0, 2]))[0]


# Passes, gradients, disk, learning by heart


def passes(datamodule: DataModule) -> list[str]:
    loaders = {"train": datamodule.train_dataloader(), "val": datamodule.val_dataloader()}
    return check_passes(loaders, {name: next(iter(loader)) for name, loader in loaders.items()})


def test_sound_loaders_pass_twice(digits: DataModule) -> None:
    assert passes(digits) == []


def test_validation_that_changes_is_a_fault(digits: DataModule) -> None:
    split = digits.splits["val"]
    split.images = Noisy(split.images)
    assert passes(digits) == [
        "val: two passes give different batches. Take what is random out of validation; see data.py."
    ]


def test_training_in_the_same_order_is_a_fault(digits: DataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data.DistributedSampler, "set_epoch", lambda self, epoch: None)
    assert passes(digits) == ["train: two epochs begin with the same batch. Shuffle the training split; see data.py."]


class Noisy:
    """Images with noise on them, another one at each use."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.shape = images, images.shape

    def __getitem__(self, rows: Tensor) -> Tensor:
        return (
            self.images[rows]
            ^ torch.randint(0, 2, (1,), dtype=torch.uint8)
            ^ torch.randint(0, 2, self.images[rows].shape, dtype=torch.uint8)
        )


@pytest.fixture
def batch(digits: DataModule) -> tuple[Tensor, Tensor]:
    return digits.splits["train"].__getitems__(list(range(32)))


def test_every_parameter_of_the_network_gets_a_gradient(task: ClassificationTask, batch: tuple[Tensor, Tensor]) -> None:
    assert check_gradients(task, batch) == []


def test_parameter_that_the_loss_does_not_reach_is_named(
    task: ClassificationTask, batch: tuple[Tensor, Tensor]
) -> None:
    task.network.forgotten = nn.Linear(2, 2, bias=False)
    assert check_gradients(task, batch) == [
        "No gradient reaches ['network.forgotten.weight']. Use them in forward, or freeze them; see model.py."
    ]


def test_network_without_anything_to_train_is_a_fault(task: ClassificationTask, batch: tuple[Tensor, Tensor]) -> None:
    task.network.requires_grad_(False)
    assert check_gradients(task, batch) == [
        "The loss depends on no parameter that could be trained. See forward in model.py."
    ]


def test_network_that_fails_on_a_batch_is_named_before_training(
    digits: DataModule, make_trainer: Callable[..., L.Trainer]
) -> None:
    task = ClassificationTask(backbone="vit_b_32")  # takes images of 224 pixels alone
    with pytest.raises(UserError, match="The network fails on a batch: .*See model.py, or --model.backbone"):
        check(make_trainer(max_epochs=1), task, digits)


def test_frozen_parameter_needs_no_gradient(task: ClassificationTask, batch: tuple[Tensor, Tensor]) -> None:
    task.network.forgotten = nn.Linear(2, 2).requires_grad_(False)
    assert check_gradients(task, batch) == []


def test_looking_at_gradients_leaves_none_behind(task: ClassificationTask, batch: tuple[Tensor, Tensor]) -> None:
    check_gradients(task, batch)
    assert all(parameter.grad is None for parameter in task.parameters())


def test_disk_without_room_for_checkpoints_is_a_fault(task: ClassificationTask) -> None:
    size = 9 * 4 * sum(parameter.numel() for parameter in task.parameters())
    assert (check_disk(task, free=size + 1), len(check_disk(task, free=size))) == ([], 1)


def test_disk_of_this_machine_has_room(task: ClassificationTask) -> None:
    assert check_disk(task) == []


def test_batch_is_learned_by_heart(run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    run_check(overfit=True)
    assert "a batch of 256 is learned by heart in" in capsys.readouterr().out


def test_batch_that_can_not_be_learned_is_a_fault(task: ClassificationTask, batch: tuple[Tensor, Tensor]) -> None:
    same = batch[0][:1].expand(32, -1, -1, -1)  # one picture with 32 labels
    (fault,) = check_memory(task, (same, batch[1]))
    assert fault.startswith("A batch of 32 is not learned by heart in 200 steps: loss ")


# The picture


def test_picture_of_a_batch_is_kept(run_check: Callable[..., None], digits: DataModule) -> None:
    run_check()
    assert Image.open(io.BytesIO(digits.documents["train_batch.png"])).format == "PNG"


def test_check_leaves_its_picture_and_the_splits(project: Path, command: Callable[..., str]) -> None:
    output = command("check", "--onnx.enabled", "false", "--registry.enabled", "false")
    names = {path.name for path in (project / "runs" / "check").iterdir()}
    assert (names, "a training batch as the network sees it" in output) == ({"train_batch.png", "split.csv"}, True)


def test_picture_shows_the_pixels_of_the_batch() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    images[1] = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1)
    sheet = Image.open(io.BytesIO(picture(images, torch.tensor([0, 1]), ["a", "b"])))
    assert (sheet.getpixel((60, 60)), sheet.getpixel((186, 60))) == ((0, 0, 0), (10, 20, 30))


def test_label_is_written_below_its_image() -> None:
    blank = torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    one, two = (picture(blank, torch.tensor([0]), [name]) for name in ("a", "b"))
    assert one != two


def test_inputs_that_are_no_images_have_no_picture() -> None:
    assert picture(torch.zeros(4, 7), torch.zeros(4, dtype=torch.int64), ["a"]) == b""


@pytest.mark.parametrize(
    ("target", "lines"),
    [
        (torch.tensor(1), ["b"]),
        (torch.tensor([0.0, 1.0, 1.0]), ["b, c"]),
        (torch.tensor([0.0, 0.0, 0.0]), ["no label"]),
        (torch.tensor([0.25, 0.0, 0.75]), ["0.75 c", "0.25 a"]),
    ],
)
def test_caption_names_the_labels(target: Tensor, lines: list[str]) -> None:
    assert caption(target, ["a", "b", "c"]) == lines


# Speed


def sleeping(seconds: float) -> Iterator[int]:
    while True:
        time.sleep(seconds)
        yield 10


def test_rate_counts_samples_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_module, "SECONDS", 0.2)
    assert 500 < rate(sleeping(0.01), torch.device("cpu")) <= 1000


def verdict(datamodule: DataModule, task: ClassificationTask, trainer: L.Trainer, **options) -> list[str]:
    loader = datamodule.train_dataloader()
    return speed(trainer, task, datamodule, loader, next(iter(loader)), options.get("price_per_hour"))


def test_fast_loader_is_fine(
    task: ClassificationTask, digits: DataModule, make_trainer: Callable[..., L.Trainer]
) -> None:
    line = verdict(digits, task, make_trainer(max_epochs=10))[0]
    assert line.endswith(": fine") and "the loader delivers" in line and "the device uses" in line


def test_slow_loader_is_named_with_what_to_change(
    task: ClassificationTask, digits: DataModule, make_trainer: Callable[..., L.Trainer]
) -> None:
    digits.splits["train"].images = Slow(digits.splits["train"].images)
    line = verdict(digits, task, make_trainer(max_epochs=10))[0]
    assert "it will wait" in line and "set --data." in line


class Slow(Noisy):
    def __getitem__(self, rows: Tensor) -> Tensor:
        time.sleep(0.1)
        return self.images[rows]


def test_files_that_are_decoded_again_and_again_are_to_be_stored(digits: DataModule) -> None:
    digits.splits["train"].images = Files([], "RGB", (3000, 256, 256, 3))
    assert advice(digits.loader("train")) == "set --data.cache_gb 1, so that files are decoded once"


def test_estimate_grows_with_the_epochs(
    task: ClassificationTask, digits: DataModule, make_trainer: Callable[..., L.Trainer]
) -> None:
    assert (
        "hours" in verdict(digits, task, make_trainer(max_epochs=1_000_000))[1]
        or "days" in verdict(digits, task, make_trainer(max_epochs=1_000_000))[1]
    )


def test_price_brings_costs_and_the_cheapest_way(
    task: ClassificationTask, digits: DataModule, make_trainer: Callable[..., L.Trainer]
) -> None:
    lines = verdict(digits, task, make_trainer(max_epochs=10), price_per_hour=2.0)
    rows = [line.split() for line in lines[3:]]
    costs = [float(row[5].rstrip(",")) for row in rows]
    cheapest = [cost for cost, row in zip(costs, rows, strict=True) if row[-1] == "cheapest"]
    assert ({row[1] for row in rows}, {row[2] for row in rows}) == ({"256", "512", "1024"}, {"32-true", "bf16-mixed"})
    assert cheapest == [min(costs)]


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "5 s"), (600, "10.0 minutes"), (9000, "2.5 hours"), (2e5, "2.3 days")]
)
def test_durations_are_said_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_measuring_leaves_the_task_as_it_is(
    task: ClassificationTask, digits: DataModule, make_trainer: Callable[..., L.Trainer]
) -> None:
    before = {key: value.clone() for key, value in task.state_dict().items()}
    verdict(digits, task, make_trainer(max_epochs=1))
    assert all(torch.equal(value, before[key]) for key, value in task.state_dict().items())


# The rehearsal, and what is left behind


def test_check_leaves_random_state_as_it_is(run_check: Callable[..., None]) -> None:
    before = (torch.get_rng_state().tolist(), np.random.get_state()[2])
    run_check(OnnxExport())
    assert (torch.get_rng_state().tolist(), np.random.get_state()[2]) == before


def test_check_leaves_the_task_unbuilt(digits: DataModule, make_trainer: Callable[..., L.Trainer]) -> None:
    task = ClassificationTask(width=4)
    check(make_trainer(max_epochs=1), task, digits)
    assert (list(task.parameters()), task.hparams["classes"]) == ([], None)


def test_export_is_tried_out(run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    run_check(OnnxExport())
    assert "export of the untrained network: equal to PyTorch within" in capsys.readouterr().out


def test_network_that_can_not_be_exported_is_refused_before_training(
    task: ClassificationTask, digits: DataModule, make_trainer: Callable[..., L.Trainer]
) -> None:
    task.network = Sorting()
    with pytest.raises(UserError, match="The network can't be exported to ONNX: .*Change its forward in model.py"):
        check(make_trainer(max_epochs=1, callbacks=[OnnxExport()]), task, digits)


def test_what_is_switched_off_is_not_tried_out(
    run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_check(OnnxExport(enabled=False), Registry(enabled=False))
    lines = capsys.readouterr().out.splitlines()[-4:-2]
    assert [line.split(" (")[0].strip() for line in lines] == ["export off", "registry off"]
