"""A run: its folder below `runs/`, the metrics of its best checkpoint, and what is said of it at the end."""

import json
import os
from datetime import datetime
from pathlib import Path

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback

from . import PACKAGE, ROOT, UserError
from .images import file_hash, replace_file
from .tracking import MLflowRun

RUNS = ROOT / "runs"


def newest_best() -> Path:
    """The best checkpoint of the newest run.

    Raises:
        UserError: No run has one yet.
    """
    found = RUNS.glob("*/checkpoints/best.ckpt")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise UserError(
            f"There is no checkpoint in {RUNS} yet. Train first (python -m {PACKAGE.name} fit), or name one."
        )
    return newest


class RunFolder(SaveConfigCallback):
    """Gives each fit a folder of its own, `runs/<date>_<time>/`, and keeps the resolved recipe in it."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        folder = Path(trainer.strategy.broadcast(self.make() if trainer.is_global_zero else ""))  # one for all ranks
        for callback in trainer.checkpoint_callbacks:
            callback.dirpath = callback.dirpath or str(folder / "checkpoints")  # type: ignore[attr-defined]
        if isinstance(trainer.logger, MLflowRun):
            trainer.logger.folder = folder
        if trainer.is_global_zero:
            name = "recipe-resumed.yaml" if (folder / "recipe.yaml").exists() else "recipe.yaml"
            self.parser.save(self.config, str(folder / name), skip_none=False, overwrite=True)

    def make(self) -> str:
        """The folder that a resumed checkpoint lies in, or a new one; two runs of one second get one each."""
        if self.config["ckpt_path"]:
            return str(Path(self.config["ckpt_path"]).resolve().parent.parent)
        stem = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        for name in (stem, *(f"{stem}_{number}" for number in range(2, 1000))):
            try:
                (RUNS / name).mkdir(parents=True)
                return str(RUNS / name)
            except FileExistsError:
                continue
        raise UserError(f"{RUNS} can't take another run of this second.")


def evaluate(
    trainer: L.Trainer, model: L.LightningModule, datamodule: L.LightningDataModule, ckpt_path: str
) -> dict[str, float]:
    """Validation and test metrics of this very checkpoint, kept in `metrics.json` of its run."""
    loggers, trainer.loggers = trainer.loggers, []  # or they would add a point to the curves of training
    metrics: dict[str, float] = {}
    for loop in (trainer.validate, trainer.test):
        loop(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False, weights_only=True)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.loggers = loggers
    if trainer.is_global_zero:
        content = json.dumps({"checkpoint_sha256": file_hash(Path(ckpt_path)), **metrics}, indent=2)
        replace_file(Path(ckpt_path).parent.parent / "metrics.json", content.encode())
    return metrics


def summary(best: Path, metrics: dict[str, float], seconds: float, leaves: list[str]) -> str:
    """What was made, where it lies and what to type next, for the end of `fit`.

    Args:
        best: The best checkpoint.
        metrics: Its metrics, named `val_*` and `test_*`.
        seconds: How long the whole command took.
        leaves: Lines of what followed training.
    """
    fit, last = f"python -m {PACKAGE.name}", best.with_name("last.ckpt")

    def of_split(split: str) -> str:
        values = {name: value for name, value in metrics.items() if name.startswith(f"{split}_")}
        return "   ".join(f"{name} {value:.4f}" for name, value in values.items())

    lines = [
        f"Run {best.parent.parent.name} of {PACKAGE.name}, {seconds:.0f} s",
        f"  best checkpoint  {of_split('val')}   {of_split('test')}",
        f"                   {os.path.relpath(best)}",
        *(f"  {line}" for line in leaves),
        "  next             mlflow ui   # in the project: curves, versions",
        f"                   {fit} predict FOLDER   # a CSV with file, class, probability",
        f"                   {fit} fit --data.source FOLDER   # your own images, one sub-folder for each class",
        f"                   {fit} fit --ckpt_path {os.path.relpath(last)} --trainer.max_epochs N   # go on",
    ]
    return "\n".join(lines)
