"""Runs that were stopped: the same command goes on with them, and with nothing else."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from mlflow import MlflowClient

from {{ cookiecutter.package_name }} import PACKAGE, DamagedFile, NoRoom, UserError, cli, runs, stopped
from {{ cookiecutter.package_name }}.checkpoints import load_checkpoint
from {{ cookiecutter.package_name }}.registry import Registry
from {{ cookiecutter.package_name }}.stopped import (
    Mark,
    StillRunning,
    identity,
    stopped_run,
    tidy_store,
    usable_point,
)
from {{ cookiecutter.package_name }}.tracking import MLflowRun

OPTIONS: dict[str, Any] = {"model": {"lr": 0.1}, "data": {"batch_size": 8, "num_workers": 0}, "ckpt_path": None}


class Send(L.Callback):
    """Sends a signal to this process at the start of one batch of an epoch."""

    def __init__(self, signum: int, epoch: int, batch: int) -> None:
        self.signum, self.epoch, self.batch = signum, epoch, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if (trainer.current_epoch, batch_idx) == (self.epoch, self.batch):
            os.kill(os.getpid(), self.signum)


@pytest.fixture
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the runs of one test."""
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch, small_fit: Callable[..., str]) -> Callable[..., int]:
    """`stop(signal.SIGTERM, 1, 2, ...)` trains until a signal comes in that epoch and batch; returns the exit code."""

    def run(signum: int, epoch: int, batch: int, *arguments: str) -> int:
        with monkeypatch.context() as patch:
            make = cli.CLI._instantiate_trainer
            send = Send(signum, epoch, batch)
            patch.setattr(cli.CLI, "_instantiate_trainer", lambda s, config, all: make(s, config, [*all, send]))
            with pytest.raises(SystemExit) as caught:
                small_fit(*arguments)
        return int(str(caught.value.code))

    return run


def weights(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = load_checkpoint(str(folder / "checkpoints" / "last.ckpt"))["state_dict"]
    return state


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_same_command_goes_on_to_the_same_weights(
    own_runs: Path, stop: Callable[..., int], small_fit: Callable[..., str], signum: int, code: int
) -> None:
    options = ["--trainer.max_epochs", "3"]
    assert stop(signum, 1, 2, *options) == code
    (folder,) = own_runs.iterdir()
    assert (folder / "unfinished").is_file()
    assert "going on with" in small_fit(*options, "--data.num_workers", "0")
    assert list(own_runs.iterdir()) == [folder] and not (folder / "unfinished").exists()
    small_fit(*options)  # that run is finished, so this is another one
    other = next(path for path in own_runs.iterdir() if path != folder)
    assert all(torch.equal(value, weights(folder)[key]) for key, value in weights(other).items())
    assert (folder / "metrics.json").read_text().split(",", 1)[1] == (other / "metrics.json").read_text().split(",", 1)[
        1
    ]


@pytest.mark.parametrize("options", [["--resume", "never"], ["--model.dropout", "0.2"]])
def test_another_command_starts_anew(
    own_runs: Path, stop: Callable[..., int], small_fit: Callable[..., str], options: list[str]
) -> None:
    stop(signal.SIGTERM, 1, 2, "--trainer.max_epochs", "2")
    assert "going on with" not in small_fit("--trainer.max_epochs", "2", *options)
    assert len(list(own_runs.iterdir())) == 2


def test_a_signal_within_an_accumulated_step_waits_for_its_end(own_runs: Path, stop: Callable[..., int]) -> None:
    options = ["--trainer.max_epochs", "2", "--trainer.accumulate_grad_batches", "2", "--last.minutes", "1000"]
    assert stop(signal.SIGTERM, 1, 2, *options) == 143
    (folder,) = own_runs.iterdir()
    point = load_checkpoint(str(folder / "checkpoints" / "last.ckpt"))
    assert point["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"] == 4


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_a_signal_after_the_last_epoch_is_not_lost(
    own_runs: Path, small_fit: Callable[..., str], monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cli.ClassificationTask, hook, lambda self: os.kill(os.getpid(), signal.SIGINT), raising=False)
        with pytest.raises(SystemExit) as caught:
            small_fit("--trainer.max_epochs", "1")
    assert caught.value.code == 130
    (folder,) = own_runs.iterdir()
    assert (folder / "unfinished").is_file() and not (folder / "metrics.json").exists()
    assert "going on with" in small_fit("--trainer.max_epochs", "1") and (folder / "metrics.json").is_file()


def test_slurm_takes_a_job_back_that_has_saved_where_it_was(
    own_runs: Path,
    stop: Callable[..., int],
    small_fit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path / "asked"}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=os.pathsep)
    job = {"JOB_ID": "1234", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert stop(signal.SIGUSR1, 1, 2, "--trainer.max_epochs", "2") == 128 + signal.SIGUSR1
    assert (tmp_path / "asked").read_text() == "requeue 1234\n"
    (folder,) = own_runs.iterdir()
    assert load_checkpoint(str(folder / "checkpoints" / "last.ckpt"))["global_step"] == 8
    assert "going on with" in small_fit("--trainer.max_epochs", "2") and not list(Path.cwd().glob("hpc_ckpt*"))
    scontrol.write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    assert stop(signal.SIGUSR1, 1, 2, "--trainer.max_epochs", "2") == 128 + signal.SIGUSR1
    assert [line for line in caplog.messages if "SLURM did not take the job 77_5 back" in line]


def test_a_device_that_fails_is_no_end(
    own_runs: Path, small_fit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def fail(self: Any) -> None:
            if self.current_epoch == 1:
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

        patch.setattr(cli.ClassificationTask, "on_validation_start", fail)
        with pytest.raises(RuntimeError, match="ECC"):
            small_fit("--trainer.max_epochs", "2")
    assert "going on with" in small_fit("--trainer.max_epochs", "2") and len(list(own_runs.iterdir())) == 1


def test_a_run_that_failed_is_not_gone_on_with(
    own_runs: Path, small_fit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cli.ClassificationTask, "loss", lambda self, logits, targets: logits.sum() * float("nan"))
        patch.setattr(cli, "check", lambda *_: None)
        with pytest.raises(SystemExit, match="val_loss is nan in epoch 1, step 0"):
            small_fit("--trainer.max_epochs", "1")
    assert not list(own_runs.glob("*/unfinished"))


def test_a_run_whose_disk_was_full_goes_on(
    own_runs: Path, small_fit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, save = ["--trainer.max_epochs", "3"], cli.DurableIO.save_checkpoint

    def full(self: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if checkpoint["epoch"] == 1:
            raise NoRoom(f"{path} can't be written: No space left on device")
        save(self, checkpoint, path)

    with monkeypatch.context() as patch:
        patch.setattr(cli.DurableIO, "save_checkpoint", full)
        with pytest.raises(SystemExit, match="No space left"):
            small_fit(*options)
    assert "going on with" in small_fit(*options) and len(list(own_runs.iterdir())) == 1


def test_each_point_is_recorded_once(
    own_runs: Path, stop: Callable[..., int], small_fit: Callable[..., str], tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    tracked = ["--trainer.logger", "true", "--logger.tracking_uri", store, "--trainer.log_every_n_steps", "1"]
    options = [*tracked, "--trainer.max_epochs", "3", "--last.minutes", "1000"]
    assert stop(signal.SIGTERM, 1, 2, *options) == 143
    (folder,) = own_runs.iterdir()
    run_id, client = (folder / "mlflow_run_id").read_text(), MlflowClient(store)
    assert client.get_run(run_id).info.status == "KILLED"
    shutil.copy(folder / "checkpoints" / "previous.ckpt", folder / "checkpoints" / "last.ckpt")  # as after a kill
    small_fit(*options)
    steps = [point.step for point in client.get_metric_history(run_id, "lr-AdamW/pg1")]
    assert (steps, client.get_run(run_id).info.status) == (list(range(15)), "FINISHED")


def test_the_last_epoch_is_recorded_though_the_run_was_stopped_right_after_it(
    own_runs: Path, small_fit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    options = ["--trainer.max_epochs", "2", "--trainer.log_every_n_steps", "1"]
    options += ["--trainer.logger", "true", "--logger.tracking_uri", store]
    with monkeypatch.context() as patch:  # as a kill would, after the last resume point
        patch.setattr(MLflowRun, "finalize", lambda *_: None)
        patch.setattr(runs, "evaluate", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(SystemExit):
            small_fit(*options)
    small_fit(*options)
    (folder,) = own_runs.iterdir()
    history = MlflowClient(store).get_metric_history((folder / "mlflow_run_id").read_text(), "train_loss")
    assert [point.step for point in history] == [4, 9]


def test_a_mark_is_held_and_not_written_anew_for_another_device_may_be_reading_it(tmp_path: Path) -> None:
    Mark(tmp_path, "mine").release(ended=False)
    os.utime(tmp_path / "unfinished", (1, 1))
    mark = Mark(tmp_path, "mine")
    assert (tmp_path / "unfinished").stat().st_mtime == 1
    take = f"import fcntl; fcntl.lockf(open({str(mark.path)!r}, 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    assert b"BlockingIOError" in subprocess.run([sys.executable, "-c", take], capture_output=True).stderr
    mark.release(ended=True)
    assert not mark.path.exists()


# What is the same run


def test_workers_make_no_difference_to_a_run() -> None:
    assert identity(OPTIONS) == identity({**OPTIONS, "data": {"batch_size": 8, "num_workers": 2}, "ckpt_path": "x"})


def test_options_and_code_make_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(OPTIONS)
    assert identity({**OPTIONS, "model": {"lr": 0.2}}) != before
    shutil.copytree(PACKAGE, tmp_path / "package")
    monkeypatch.setattr(stopped, "PACKAGE", tmp_path / "package")
    assert identity(OPTIONS) == before
    with (tmp_path / "package" / "model.py").open("a") as file:
        file.write("# changed\n")
    assert identity(OPTIONS) != before


# What can be gone on with


@pytest.fixture
def stopped_folder(own_runs: Path, trained: SimpleNamespace) -> Path:
    """A run's folder with two resume points and the mark of a process that is no more."""
    folder = own_runs / "20"
    shutil.copytree(trained.folder, folder)
    (folder / "unfinished").write_text("mine")
    return folder


def test_the_newest_point_is_taken(stopped_folder: Path) -> None:
    found = stopped_run("mine")
    assert found is not None and found[0] is not None
    assert found[1] == stopped_folder / "checkpoints" / "last.ckpt" and stopped_run("another") is None
    found[0].release(ended=True)
    assert stopped_run("mine") is None


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    elif how == "text":
        content = bytearray(b"no checkpoint")
    else:
        with zipfile.ZipFile(path) as file:
            entry = max(file.infolist(), key=lambda item: item.file_size)
        content[entry.header_offset + 200 + entry.file_size // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["cut", "empty", "text", "flip"])
def test_a_damaged_point_is_named_and_the_one_before_is_taken(
    stopped_folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(stopped, "rank_zero_info", lines.append)
    damage(stopped_folder / "checkpoints" / "last.ckpt", how)
    assert usable_point(stopped_folder) == stopped_folder / "checkpoints" / "previous.ckpt"
    assert len(lines) == 1 and "last.ckpt can't be read" in lines[0]
    damage(stopped_folder / "checkpoints" / "previous.ckpt", how)
    assert usable_point(stopped_folder) is None


def test_a_point_with_code_in_it_stops_the_command_and_is_not_run(stopped_folder: Path, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"state_dict": Attack()}, stopped_folder / "checkpoints" / "last.ckpt")
    with pytest.raises(UserError, match="last.ckpt is whole, but can't be read") as caught:
        stopped_run("mine")
    assert not isinstance(caught.value, DamagedFile) and not (tmp_path / "ran").exists()


@pytest.fixture
def other_process(stopped_folder: Path) -> Iterator[None]:
    """Trains that run, as far as its mark says."""
    code = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, 2); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(stopped_folder / "unfinished")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def test_a_run_that_is_still_trained_is_left_alone(stopped_folder: Path, other_process: None) -> None:
    assert stopped_run("mine") is None
    with pytest.raises(StillRunning, match="The run 20 is still being trained"):
        Mark(stopped_folder, "mine")
    assert (stopped_folder / "unfinished").read_text() == "mine"


# Runs that are dead, in the store


@pytest.fixture
def run_id(stopped_folder: Path, tmp_path: Path) -> str:
    """A run that the store takes to be RUNNING."""
    client = MlflowClient(f"sqlite:///{tmp_path / 'store.db'}")
    run_id: str = client.create_run(client.create_experiment("dead")).info.run_id
    (stopped_folder / "mlflow_run_id").write_text(run_id)
    return run_id


def status_after_clean_up(tmp_path: Path, run_id: str, own: Mark | None = None) -> str:
    run = MLflowRun("dead", f"sqlite:///{tmp_path / 'store.db'}")
    tidy_store(run, own)
    return str(run.experiment.get_run(run_id).info.status)


def test_a_dead_run_counts_as_killed(run_id: str, tmp_path: Path) -> None:
    assert status_after_clean_up(tmp_path, run_id) == "KILLED"


def test_a_living_run_is_left_running(run_id: str, other_process: None, tmp_path: Path) -> None:
    assert status_after_clean_up(tmp_path, run_id) == "RUNNING"


def test_the_run_that_goes_on_is_left_running(run_id: str, stopped_folder: Path, tmp_path: Path) -> None:
    mark = Mark(stopped_folder, "mine")
    assert status_after_clean_up(tmp_path, run_id, mark) == "RUNNING"
    mark.release(ended=True)


def test_a_dead_run_of_another_store_is_no_obstacle(stopped_folder: Path, run_id: str, tmp_path: Path) -> None:
    (stopped_folder / "mlflow_run_id").write_text("0" * 32)
    assert status_after_clean_up(tmp_path, run_id) == "RUNNING"
    run = MLflowRun("dead", f"sqlite:///{tmp_path / 'store.db'}")
    tidy_store(run, None)
    trainer: Any = SimpleNamespace(logger=run)
    assert Registry(model_name="alive").rehearse(trainer, None, None).startswith("registry answers")  # type: ignore[arg-type]
    assert run.run_id is not None
