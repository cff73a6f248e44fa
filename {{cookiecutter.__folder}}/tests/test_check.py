"""What is looked at before the first epoch, and what it finds."""

from collections.abc import Callable

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }}.check import check, check_batch, check_labels
from {{ cookiecutter.package_name }}.data import ImageData
from {{ cookiecutter.package_name }}.export import OnnxExport
from {{ cookiecutter.package_name }}.registry import Registry
from {{ cookiecutter.package_name }}.task import ClassificationTask


class Sorting(nn.Module):
    """A network that PyTorch can run and ONNX can't hold: what it does depends on the values of its inputs."""

    def forward(self, images: Tensor) -> Tensor:
        features = images.float().flatten(1)
        return features[:, :10] if features.sum() > 0 else features[:, 10:20]


@pytest.fixture
def run_check(digits: ImageData, make_trainer: Callable[..., L.Trainer]) -> Callable[..., None]:
    """`run_check(callbacks)` checks the digits and an untrained task."""

    def run(*callbacks: L.Callback) -> None:
        check(make_trainer(max_epochs=1, callbacks=list(callbacks)), ClassificationTask(width=4), digits)

    return run


def change_labels(datamodule: ImageData, split: str, old: int, new: int) -> None:
    """In one split alone."""
    labels = datamodule.splits[split].labels.clone()
    datamodule.splits[split].labels = labels.where(labels != old, torch.tensor(new))


def faults_of(task: ClassificationTask, datamodule: ImageData, inputs: Tensor) -> list[str]:
    batch = (inputs, torch.zeros(len(inputs), dtype=torch.int64))
    return check_batch(task, datamodule, "train", [batch])


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


def test_label_that_has_no_class_is_refused(digits: ImageData, run_check: Callable[..., None]) -> None:
    change_labels(digits, "val", 3, 10)
    with pytest.raises(UserError, match=r"val: labels \[10\], expected 0 to 9. Correct them in sources.py"):
        run_check()


def test_negative_label_is_refused(digits: ImageData, run_check: Callable[..., None]) -> None:
    change_labels(digits, "test", 3, -1)
    with pytest.raises(UserError, match=r"test: labels \[-1\], expected 0 to 9"):
        run_check()


def test_empty_split_is_refused(digits: ImageData, run_check: Callable[..., None]) -> None:
    digits.splits["val"].rows = digits.splits["val"].rows[:0]
    with pytest.raises(UserError, match="val: the split is empty. Add samples."):
        run_check()


def test_class_without_training_sample_is_refused(digits: ImageData, run_check: Callable[..., None]) -> None:
    change_labels(digits, "train", 3, 4)
    with pytest.raises(UserError, match=r"train: no sample of \['3'\]. Add some"):
        run_check()


def test_class_without_val_sample_is_warned_of(
    digits: ImageData, run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    change_labels(digits, "val", 3, 4)
    run_check()
    assert "warning: val has no sample of ['3']; its metrics say nothing of them" in capsys.readouterr().out


def test_everything_to_put_right_is_named_at_once(digits: ImageData, run_check: Callable[..., None]) -> None:
    change_labels(digits, "train", 3, 4)
    change_labels(digits, "test", 3, 10)
    with pytest.raises(UserError, match=r"check found 2 to put right before training:\ntrain: .*\ntest: "):
        run_check()


def test_label_faults_are_returned_in_the_order_of_the_splits(digits: ImageData) -> None:
    for split in ("train", "val", "test"):
        change_labels(digits, split, 9, 99)
    assert [fault.split(":")[0] for fault in check_labels(digits)] == ["train", "train", "val", "test"]


def test_inputs_of_another_shape_are_a_fault(task: ClassificationTask, digits: ImageData) -> None:
    (fault,) = faults_of(task, digits, torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    assert fault.startswith("train: inputs are (4, 3, 8, 8) uint8 in [0, 0], expected (B, *[1, 8, 8]) uint8")


def test_inputs_of_another_dtype_are_a_fault(task: ClassificationTask, digits: ImageData) -> None:
    (fault,) = faults_of(task, digits, torch.rand(4, 1, 8, 8))
    assert "(4, 1, 8, 8) float32" in fault


def test_inputs_that_are_not_finite_are_a_fault(task: ClassificationTask, digits: ImageData) -> None:
    digits.input_spec["dtype"] = "float32"
    inputs = torch.rand(4, 1, 8, 8)
    inputs[0, 0, 0, 0] = float("nan")
    assert faults_of(task, digits, inputs) == ["train: inputs hold NaN or infinity. See data.py."]


def test_inputs_that_are_all_alike_are_a_fault(task: ClassificationTask, digits: ImageData) -> None:
    inputs = torch.full((4, 1, 8, 8), 7, dtype=torch.uint8)
    assert faults_of(task, digits, inputs) == ["train: every input value of the batch is 7. See data.py."]


def test_untrained_loss_that_is_not_finite_is_a_fault(task: ClassificationTask, digits: ImageData) -> None:
    task.network.head[1].bias.data.fill_(float("nan"))
    inputs = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert faults_of(task, digits, inputs) == ["train: the untrained network's loss is nan. See model.py and task.py."]


def test_batch_that_exceeds_the_data_is_refused_before_training(
    digits: ImageData, run_check: Callable[..., None]
) -> None:
    digits.hparams["batch_size"] = 2000
    with pytest.raises(UserError, match="fewer than a batch of 2000"):
        run_check()


def test_check_leaves_random_state_as_it_is(run_check: Callable[..., None]) -> None:
    before = (torch.get_rng_state().tolist(), np.random.get_state()[2])
    run_check(OnnxExport())
    assert (torch.get_rng_state().tolist(), np.random.get_state()[2]) == before


def test_check_leaves_the_task_unbuilt(digits: ImageData, make_trainer: Callable[..., L.Trainer]) -> None:
    task = ClassificationTask(width=4)
    check(make_trainer(max_epochs=1), task, digits)
    assert (list(task.parameters()), task.hparams["classes"]) == ([], None)


def test_export_is_tried_out(run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    run_check(OnnxExport())
    assert "export of the untrained network: equal to PyTorch within" in capsys.readouterr().out


def test_network_that_can_not_be_exported_is_refused_before_training(
    task: ClassificationTask, digits: ImageData, make_trainer: Callable[..., L.Trainer]
) -> None:
    task.network = Sorting()
    with pytest.raises(UserError, match="The network can't be exported to ONNX: .*Change its forward in model.py"):
        check(make_trainer(max_epochs=1, callbacks=[OnnxExport()]), task, digits)


def test_what_is_switched_off_is_not_tried_out(
    run_check: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_check(OnnxExport(enabled=False), Registry(enabled=False))
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split(" (")[0].strip() for line in lines] == ["export off", "registry off"]
