"""What the tests share: a project folder of their own, the command line in this process, and one short training."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from filelock import FileLock

from {{ cookiecutter.package_name }} import check, cli, data, registry, runs, sources, speed, store
from {{ cookiecutter.package_name }}.cli import RECIPE
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.task import ClassificationTask

# Few and cheap steps: 5 of 256 digits an epoch, on the CPU.
SMALL = ["--data.batch_size", "256", "--model.width", "4", "--trainer.accelerator", "cpu"]
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
ALONE = ["--trainer.logger", "false", "--onnx.enabled", "false", "--registry.enabled", "false"]


@pytest.fixture(scope="session", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder in the place of the project's, so that no test writes into the checkout."""
    folder = tmp_path_factory.mktemp("project")
    torch.set_num_threads(1)  # networks this small gain nothing from more, and lose much where cores are shared
    with pytest.MonkeyPatch.context() as patch:
        for module in (check, data, registry, sources, store):
            patch.setattr(module, "ROOT", folder)
        patch.setattr(speed, "SECONDS", 0.01)
        patch.setattr(store, "STORE_LOCK", FileLock(folder / ".mlflow.lock"))
        patch.setattr(runs, "RUNS", folder / "runs")
        yield folder


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same start for each test, with the warnings that a run of the command line has."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow notes the last store there
    cli.quiet()
    torch.manual_seed(0)


def call(*arguments: str) -> str:
    """Run a command of the command line in this process; returns what it prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(sys, "argv", ["project", *arguments])
        cli.run()
    return output.getvalue()


@pytest.fixture(scope="session")
def command() -> Callable[..., str]:
    """`command("test", PATH)` runs a command with few and cheap steps and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        return call(name, *arguments, *QUIET, "--trainer.accelerator", "cpu")

    return run


@pytest.fixture(scope="session")
def small_fit() -> Callable[..., str]:
    """`small_fit("--trainer.max_epochs", "1")` trains briefly, with neither export nor MLflow."""

    def run(*arguments: str) -> str:
        return call("fit", *SMALL, *QUIET, *ALONE, *arguments)

    return run


@pytest.fixture(scope="session")
def trained(project: Path) -> SimpleNamespace:
    """One whole `fit` of the command line, as a user would run it: its folder, its checkpoints, what it printed."""
    before = set((project / "runs").glob("20*"))
    # In float32, whatever this processor is fast with: the metrics of the export can then be compared closely.
    options = ["--trainer.max_epochs", "3", "--trainer.log_every_n_steps", "1", "--trainer.precision", "32-true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow notes the store of an earlier test there
        output = call("fit", *SMALL, *QUIET, *options)
    (folder,) = set((project / "runs").glob("20*")) - before
    checkpoints = folder / "checkpoints"
    return SimpleNamespace(
        folder=folder, best=checkpoints / "best.ckpt", last=checkpoints / "last.ckpt", output=output, epochs=3
    )


@pytest.fixture(scope="session")
def recipe() -> dict[str, Any]:
    """The content of recipe.yaml."""
    content: dict[str, Any] = yaml.safe_load(RECIPE.read_text("utf-8"))
    return content


@pytest.fixture
def digits() -> DataModule:
    """The digits, split, in batches of 256."""
    datamodule = DataModule(batch_size=256)
    datamodule.setup("fit")
    return datamodule


@pytest.fixture
def task(digits: DataModule) -> ClassificationTask:
    """A small task with a fresh network for the digits."""
    torch.manual_seed(0)
    task = ClassificationTask(width=4)
    task.adopt(digits)
    return task


@pytest.fixture(scope="session")
def make_trainer(recipe: dict[str, Any]) -> Callable[..., L.Trainer]:
    """`make_trainer(max_epochs=1)` makes a quiet Trainer on the CPU, with the recipe's settings."""
    shared = {key: recipe["trainer"][key] for key in ("deterministic", "gradient_clip_val", "use_distributed_sampler")}
    quiet = {"logger": False, "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}

    def make(**options: Any) -> L.Trainer:
        defaults = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
        return L.Trainer(**{**shared, **quiet, **defaults, **options})

    return make
