"""Resuming within an epoch, and checkpoints that reach the disk whole or not at all."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }}.checkpoints import DurableIO, load_checkpoint
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.resume import ResumePoint
from {{ cookiecutter.package_name }}.task import ClassificationTask


class Terminate(L.Callback):
    """Sends a real SIGTERM to this process while a given batch of the second epoch is trained on."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.current_epoch == 1 and batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


class History(Checkpoint):
    """Keeps the metrics of each epoch. Called like a checkpoint, after the task has logged them."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rows[trainer.current_epoch] = metrics


@pytest.fixture
def fit(make_trainer: Callable[..., L.Trainer]) -> Callable[..., tuple[list[Tensor], dict[int, dict[str, float]]]]:
    """Trains for three epochs of five batches; returns all tensors of network and optimizer, and the metrics."""

    def run(
        *callbacks: L.Callback, ckpt_path: Path | None = None, num_workers: int = 0, mixup: float = 0.0, **options: Any
    ) -> tuple[list[Tensor], dict[int, dict[str, float]]]:
        L.seed_everything(1, workers=True, verbose=False)
        datamodule = DataModule(batch_size=256, seed=1, num_workers=num_workers, mixup=mixup)
        history, model = History(), ClassificationTask(width=4, dropout=0.3)
        trainer = make_trainer(
            max_epochs=3, callbacks=[history, *callbacks], enable_checkpointing=True, plugins=[DurableIO()], **options
        )
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
        state = trainer.optimizers[0].state_dict()["state"]
        tensors = [*model.network.state_dict().values(), *(t for item in state.values() for t in item.values())]
        return tensors, history.rows

    return run


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (0, {}),
        (2, {}),
        (4, {}),  # the last one: the epoch is then ended first
        (2, {"accumulate_grad_batches": 2}),
        (4, {"accumulate_grad_batches": 2}),
        (2, {"mixup": 0.2}),
        (3, {"val_check_interval": 2}),  # validation follows, and would be skipped: stopped one batch later
    ],
)
def test_a_run_stopped_within_an_epoch_goes_on_to_the_same_bits(
    fit: Callable[..., Any], tmp_path: Path, batch: int, options: dict[str, Any]
) -> None:
    tensors, rows = fit(ResumePoint(dirpath=str(tmp_path / "whole")), **options)
    with pytest.raises(SIGTERMException):
        fit(ResumePoint(dirpath=str(tmp_path)), Terminate(batch), **options)
    resumed, later = fit(
        ResumePoint(dirpath=str(tmp_path)), ckpt_path=tmp_path / "last.ckpt", num_workers=2 * (batch == 2), **options
    )
    assert all(map(torch.equal, resumed, tensors))
    assert later == {epoch: rows[epoch] for epoch in ((2,) if batch >= 3 else (1, 2))}


def test_a_point_is_written_within_an_epoch_when_its_time_has_come(fit: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(SIGTERMException):
        fit(ResumePoint(minutes=0, dirpath=str(tmp_path)), Terminate(3))
    steps = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["global_step"] for name in ("previous", "last")]
    assert steps == [8, 9]  # by the clock after three of the second epoch's batches, and by the signal after four


def test_a_full_disk_leaves_the_old_checkpoint_and_names_the_cause(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "last.ckpt"
    DurableIO().save_checkpoint({"kept": torch.ones(10)}, path)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(UserError, match=os.strerror(errno.EFBIG)):
            DurableIO().save_checkpoint({"large": torch.ones(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "kept" in torch.load(path, weights_only=True)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_written(tmp_path: Path, value: float) -> None:
    path = tmp_path / "last.ckpt"
    DurableIO().save_checkpoint({"state_dict": {"network.weight": torch.ones(3)}}, path)
    with pytest.raises(UserError, match=r"network.weight holds NaN or infinity, so last.ckpt is not written"):
        DurableIO().save_checkpoint({"state_dict": {"network.weight": torch.tensor([1.0, value])}}, path)
    assert torch.load(path, weights_only=True)["state_dict"]["network.weight"].tolist() == [1.0, 1.0, 1.0]


def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    DurableIO().save_checkpoint({"weights": torch.ones(1000)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(100).numpy().tobytes()) + 50] ^= 1
    path.write_bytes(content)
    assert not torch.load(path, weights_only=True)["weights"].eq(1).all()  # PyTorch takes it as it is
    with pytest.raises(UserError, match="last.ckpt can't be read as a checkpoint: wrong checksum"):
        load_checkpoint(str(path))


def test_each_batch_has_draws_of_its_own(make_trainer: Callable[..., L.Trainer]) -> None:
    seen: list[Tensor] = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            seen.append(batch[0])

    datamodule = DataModule(batch_size=256)
    datamodule.setup("fit")
    images = datamodule.splits["train"].images
    datamodule.splits["train"].images = images[:1].expand_as(images)  # one picture: what differs is drawn
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[Keep()])
    trainer.fit(ClassificationTask(width=1), datamodule=datamodule)
    assert len(seen) == 10 and not any(torch.equal(one, two) for one, two in itertools.combinations(seen, 2))


@pytest.mark.parametrize(
    ("option", "value"), [("data.batch_size", "128"), ("data.max_shift", "0"), ("model.lr", "0.1")]
)
def test_a_resume_that_would_mix_two_runs_is_refused(
    trained: SimpleNamespace, command: Callable[..., str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit, match=f"{option} is .* in the checkpoint, which a resumed run keeps"):
        command("fit", "--ckpt_path", str(trained.last), f"--{option}", value, "--trainer.max_epochs", "9")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # the folder is a copy
def test_other_options_of_a_resumed_run_are_said(
    trained: SimpleNamespace, command: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, options = tmp_path / "run", ["--trainer.max_epochs", "3", "--trainer.precision", "32-true"]
    options += ["--trainer.log_every_n_steps", "1", "--trainer.logger", "false", "--onnx.enabled", "false"]
    shutil.copytree(trained.folder, folder)
    arguments = ["fit", "--ckpt_path", str(folder / "checkpoints" / "last.ckpt"), *options]
    command(*arguments, "--seed_everything", "43", "--trainer.gradient_clip_val", "0.5")
    (line,) = [line for line in caplog.messages if "from here on other options" in line]
    for word in (
        "seed_everything 43 (was 42)",
        "trainer.gradient_clip_val 0.5 (was 1.0)",
        "trainer.logger False (was ",
    ):
        assert word in line
    assert "max_epochs" not in line


def test_averaged_weights_are_the_ones_that_are_measured(
    project: Path, command: Callable[..., str], small_fit: Callable[..., str]
) -> None:
    before = set((project / "runs").glob("20*"))
    small_fit("--ema.decay", "0.5", "--trainer.max_epochs", "3")
    (folder,) = set((project / "runs").glob("20*")) - before
    metrics = json.loads((folder / "metrics.json").read_text())
    output = command("test", str(folder / "checkpoints" / "best.ckpt"))
    assert re.search(r"test_loss\D+([\d.]+)", output).group(1)[:6] == f"{metrics['test_loss']:.6f}"[:6]
