"""A run: its folder below `runs/`, the metrics of its best checkpoint, and what is said of it at the end."""

import csv
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from . import PACKAGE, ROOT, UserError
from .facts import run_documents, run_facts
from .images import file_hash, replace_file
from .tracking import MLflowRun

RUNS = ROOT / "runs"


def run_folder(checkpoint: str | Path) -> Path:
    """The folder of the run that a checkpoint belongs to: checkpoints lie in its `checkpoints/`."""
    return Path(checkpoint).resolve().parent.parent


def newest_best() -> Path:
    """The best checkpoint of the newest run.

    Raises:
        UserError: No run has one yet.
    """
    found = RUNS.glob("*/checkpoints/best.ckpt")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise UserError(f"There is no checkpoint in {RUNS} yet. Train first: python -m {PACKAGE.name} fit")
    return newest


class RunFolder(SaveConfigCallback):
    """Gives each fit a folder of its own, `runs/<date>_<time>/`, and keeps in it, and with the MLflow run, the resolved
    recipe and what the run is made of."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        folder = Path(trainer.strategy.broadcast(self.make() if trainer.is_global_zero else ""))  # one for all ranks
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "dirpath"):
                callback.dirpath = callback.dirpath or str(folder / "checkpoints")
        if isinstance(trainer.logger, MLflowRun):
            trainer.logger.use_folder(folder)
        if trainer.is_global_zero:
            recipe = self.parser.dump(self.config, skip_unset=False).encode()
            resumed = "-resumed" if (folder / "recipe.yaml").exists() else ""
            if resumed:
                tell_changes(yaml.safe_load((folder / "recipe.yaml").read_text()), yaml.safe_load(recipe))
            self.documents = {f"recipe{resumed}.yaml": recipe, **run_documents(), **trainer.datamodule.documents}
            for name, content in self.documents.items():
                replace_file(folder / name, content)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.logger, MLflowRun) and trainer.is_global_zero:
            classes = json.dumps(pl_module.hparams["classes"], ensure_ascii=False)
            trainer.logger.log_tags({**run_facts(), **pl_module.hparams["fingerprint"], "classes": classes})
            trainer.logger.log_documents(self.documents)
            trainer.logger.flush()  # so that the run is to be seen, and a store that refuses is known, from the start

    def make(self) -> str:
        """The folder that a resumed checkpoint lies in, or a new one; of runs in the same second, each gets its own."""
        if self.config["ckpt_path"]:
            return str(run_folder(self.config["ckpt_path"]))
        while True:
            folder = RUNS / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            try:
                folder.mkdir(parents=True)
                return str(folder)
            except FileExistsError:
                time.sleep(0.1)


def tell_changes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Say in one line in which options, beside those of model and data, a run goes on in another way than it began."""

    def flat(options: dict[str, Any]) -> dict[str, Any]:
        return {
            f"{section}.{key}".rstrip("."): value
            for section, values in options.items()
            if section not in ("model", "data", "ckpt_path", "resume")
            for key, value in (values if isinstance(values, dict) else {"": values}).items()
        }

    old, new = flat(before), flat(now)
    if changes := [f"{key} {new[key]} (was {old.get(key)})" for key in new if new[key] != old.get(key)]:
        rank_zero_info(f"warning: from here on other options, and curves of two kinds: {', '.join(changes)}")


@rank_zero_only
def show(documents: dict[str, bytes]) -> None:
    """Keep what `check` found in `runs/check/`, where it can be looked at."""
    for name, content in documents.items():
        replace_file(RUNS / "check" / name, content)
    print(f"  a training batch as the network sees it, and the splits: {os.path.relpath(RUNS / 'check')}")


class EpochLine(Callback):
    """Where no terminal can show a progress bar, a line for each epoch says how far the run is."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics = trainer.callback_metrics.items()
            values = ", ".join(f"{name} {float(value):.4f}" for name, value in metrics if name.startswith("val_"))
            rank_zero_info(f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}: {values}")


def evaluate(
    trainer: Trainer, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str
) -> dict[str, float]:
    """Validation and test metrics of this very checkpoint on its own data, kept in `metrics.json` of its run."""
    datamodule.setup("validate")
    model.refuse_other_data(datamodule)  # type: ignore[operator]
    metrics: dict[str, float] = {}
    # Loggers would add a point to the curves of training; averaging would exchange the weights that are measured.
    loggers, callbacks = trainer.loggers, trainer.callbacks
    trainer.loggers = []
    trainer.callbacks = [item for item in callbacks if not isinstance(item, WeightAveraging)]
    try:
        for loop in (trainer.validate, trainer.test):
            loop(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False, weights_only=True)
            metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    finally:
        trainer.loggers, trainer.callbacks = loggers, callbacks
    if trainer.is_global_zero:
        known = {"checkpoint_sha256": file_hash(Path(ckpt_path)), **metrics, "per_class": model.per_class}
        content = json.dumps(known, indent=2, ensure_ascii=False)
        replace_file(run_folder(ckpt_path) / "metrics.json", content.encode())
    return metrics


def write_predictions(path: Path, names: list[str], model: LightningModule, outputs: torch.Tensor) -> None:
    """A CSV with one row for each sample: its name, class and probability; for multi-label the labels of at least 0.5
    between semicolons and the probability of each; of another task the outputs as they are, (N, K)."""
    classes, task = model.hparams["classes"], model.hparams["task"]
    heads = {"multiclass": ["class", "probability"], "multilabel": ["labels", *classes]}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", *heads.get(task, classes)])
        for name, row in zip(names, outputs.tolist(), strict=True):
            values = [f"{value:.6f}" for value in row]
            if task == "multiclass":
                values = [classes[row.index(max(row))], max(values)]
            elif task == "multilabel":
                labels = [label for label, value in zip(classes, row, strict=True) if value >= 0.5]
                values = [";".join(labels), *values]
            writer.writerow([name, *values])
    print(f"{len(names)} predicted: {os.path.relpath(path)}")


def weakest(per_class: dict[str, dict[str, float]]) -> list[str]:
    """A line with the three classes of the lowest test accuracy."""
    worst = sorted(per_class.get("test_acc_per_class", {}).items(), key=lambda item: item[1])[:3]
    return ["weakest classes  " + "   ".join(f"{name[:20]} {value:.4f}" for name, value in worst)] * bool(worst)


def summary(best: Path, metrics: dict[str, float], seconds: float, leaves: list[str]) -> str:
    """What `fit` made, where it lies and what to type next; `leaves` are further lines on it."""
    command, last = f"python -m {PACKAGE.name}", os.path.relpath(best.with_name("last.ckpt"))
    splits = {name.partition("_")[0]: "" for name in metrics}
    for name, value in metrics.items():
        split, _, metric = name.partition("_")
        splits[split] += f"   {metric} {value:.4f}"
    lines = [
        f"{PACKAGE.name}, run {best.parent.parent.name}, {seconds:.0f} s",
        f"best checkpoint  {os.path.relpath(best)}",
        *(f"                 {split:4}{values}" for split, values in splits.items()),
        *leaves,
        "next             mlflow ui   (curves and versions; type it in the project's folder)",
        f"                 {command} predict FOLDER   (a CSV with file, class and probability)",
        f"                 {command} fit --data.source FOLDER   (your own images, one sub-folder for each class)",
        f"                 {command} fit --trainer.max_epochs N --ckpt_path {last}   (resume)",
    ]
    return "\n".join(lines)
