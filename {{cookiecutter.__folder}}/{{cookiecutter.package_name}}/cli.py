"""The command line: which model, data and callbacks make a run, what follows it, and how mistakes are answered."""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info

from . import PACKAGE, ROOT, runs
from .check import check
from .checkpoints import DurableIO, checkpoint_options, load_checkpoint, refuse_mixing
from .curves import Curves
from .data import DataModule
from .export import OnnxExport, export, export_summary
from .parser import Parser, quiet, short_answers
from .registry import Registry, register, register_best
from .resume import ResumePoint
from .speed import cpu_precision
from .stopped import goes_on, identity, stopped_run, stopping_at_once, sync, tidy_store
from .task import ClassificationTask
from .tracking import MLflowRun
from .tune import tune

RECIPE = ROOT / "recipe.yaml" if (ROOT / "recipe.yaml").is_file() else PACKAGE / "recipe.yaml"


class Trainer(L.Trainer):
    """Lightning's Trainer, with our commands beside its own: each method that `CLI.subcommands` names is one."""

    check = check
    tune = tune
    export = export
    register = register
    sync = sync


class CLI(LightningCLI):
    """LightningCLI whose defaults are the recipe, and whose `fit` ends with a verified, registered model."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The one that was typed: to build the options of all would take longer than a short training."""
        ours = {"model", "datamodule"}
        every = {
            **LightningCLI.subcommands(),
            "check": ours,
            "tune": ours,
            "sync": ours,
            "export": ours,
            "register": ours,  # a line for each, to be taken out with its file
        }
        return {sys.argv[1]: every[sys.argv[1]]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        help = "fit: auto goes on with a stopped run of the same options and code; never; or a checkpoint's path"
        parser.add_argument("--resume", default="auto", help=help)
        parser.link_arguments("seed_everything", "data.seed")
        parser.add_class_arguments(MLflowRun, "logger", instantiate=False)  # only where a run is recorded
        parser.add_lightning_class_args(theirs.TQDMProgressBar, "progress_bar")
        parser.add_lightning_class_args(theirs.LearningRateMonitor, "lr_monitor")
        parser.add_lightning_class_args(theirs.EMAWeightAveraging, "ema")
        parser.add_lightning_class_args(theirs.EarlyStopping, "early_stopping")
        # The first one is the Trainer's own: the best.
        parser.add_lightning_class_args(theirs.ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(Curves, "curves")
        parser.add_lightning_class_args(ResumePoint, "last")
        parser.add_lightning_class_args(OnnxExport, "onnx")  # not "export": the command has the name
        parser.add_lightning_class_args(Registry, "registry")

    def _parse_ckpt_path(self) -> None:
        """Options default to those that the checkpoint was trained with. Lightning's own version lets the checkpoint
        win over what the user sets, without a word (Lightning-AI/pytorch-lightning#21455)."""
        command = self.config["subcommand"]
        if command == "fit":
            self.find_stopped()
        path = self.config[command].get("ckpt_path")
        if not path:
            return
        self.checkpoint = load_checkpoint(path)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "checkpoint.yaml"
            file.write_text(yaml.safe_dump(checkpoint_options(self.checkpoint)))
            parser = self._parser(command)
            parser.default_config_files = [*parser.default_config_files, str(file)]
            self.parse_arguments(self.parser, None)

    def find_stopped(self) -> None:
        """Go on with the run that `--resume` names, by default with the newest one that the same command began."""
        config, self.mark = self.config["fit"], None
        resume, self.identity = config["resume"], identity(config.as_dict())
        if resume == "auto" and not config["ckpt_path"] and (found := stopped_run(self.identity)):
            self.mark, resume = found
            print(f"going on with {os.path.relpath(resume)}, which was stopped; --resume never starts anew", flush=True)
        if resume not in ("auto", "never"):
            sys.argv += ["--ckpt_path", str(resume)]  # for the processes of further devices as well
            self.parse_arguments(self.parser, None)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self._get(self.config_init, "trainer")
        cuda = config["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        if not cuda and (wanted := str(config["precision"])) in ("16", "16-mixed"):
            kwargs["precision"] = cpu_precision()
            rank_zero_info(f"precision: {wanted} needs CUDA, so this run computes in {kwargs['precision']}")
        if self.subcommand in ("validate", "test", "predict"):
            kwargs["logger"] = False
        elif config["logger"] in (None, True):
            kwargs["logger"] = MLflowRun(**self._get(self.config_init, "logger"))
            if path := self._get(self.config, "ckpt_path"):
                kwargs["logger"].use_folder(runs.run_folder(path))  # a resumed run goes on in the same MLflow run
        if self.subcommand != "fit":
            kwargs["enable_checkpointing"] = False
        if self.subcommand not in ("fit", "validate", "test"):
            kwargs["devices"] = 1
        return super().instantiate_trainer(**kwargs)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[L.Callback]) -> L.Trainer:
        """Leave out the callbacks that have nothing to do, some of which Lightning would refuse."""
        fitting = self.subcommand == "fit"
        if not sys.stderr.isatty():
            config["enable_progress_bar"] = False
            callbacks.append(runs.EpochLine())
        on = {
            **dict.fromkeys((theirs.ModelCheckpoint, Curves, ResumePoint), config["enable_checkpointing"] is not False),
            theirs.EarlyStopping: fitting,
            theirs.EMAWeightAveraging: fitting and self._get(self.config, "ema")["decay"] > 0,
            theirs.TQDMProgressBar: config["enable_progress_bar"] is not False,
            theirs.LearningRateMonitor: fitting and config["logger"] is not False,
        }
        config["plugins"] = [*(config["plugins"] or []), DurableIO()]
        return super()._instantiate_trainer(config, [item for item in callbacks if on.get(type(item), True)])

    def after_check(self) -> None:
        """Show what `fit` would keep with its run."""
        runs.show(self.datamodule.documents)

    def resume_points(self) -> list[ResumePoint]:
        return [item for item in self.trainer.callbacks if isinstance(item, ResumePoint)]

    def before_fit(self) -> None:
        self.started = time.perf_counter()
        if self.config["fit"]["ckpt_path"]:
            refuse_mixing(self.checkpoint, {"model": self.model.hparams, "data": self.datamodule.hparams})
        if isinstance(self.trainer.logger, MLflowRun):
            self.trainer.logger.keep_open = True
            tidy_store(self.trainer.logger, self.mark)
        for point in self.resume_points():
            point.mark, point.identity, point.same_run = self.mark, self.identity, self.mark is not None
        with stopping_at_once():
            check(self.trainer, self.model, self.datamodule)
            self.datamodule.setup("fit")
        self.model.adopt(self.datamodule)  # before any callback is set up, for one may copy the network to average it

    def after_fit(self) -> None:
        """Evaluate, register and sum up the best checkpoint, all as part of the same MLflow run."""
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        if not best:
            rank_zero_info("No checkpoint was written, so nothing is evaluated, exported or registered.")
            return self.end_run("success")
        try:
            with stopping_at_once():
                metrics = runs.evaluate(self.trainer, self.model, self.datamodule, best)
                if self.trainer.is_global_zero:
                    lines = runs.weakest(self.model.per_class)
                    lines += export_summary(Path(best))
                    lines += register_best(self.trainer, Path(best), metrics)
                    print(runs.summary(Path(best), metrics, time.perf_counter() - self.started, lines), flush=True)
        except BaseException as error:
            self.end_run("failed", ended=not goes_on(error))
            raise
        self.end_run("success")

    def end_run(self, status: str, ended: bool = True) -> None:
        if isinstance(self.trainer.logger, MLflowRun):
            self.trainer.logger.keep_open = False
            self.trainer.logger.finalize(status)
        for point in self.resume_points():
            point.end(ended)

    def predict(self, model: L.LightningModule, datamodule: DataModule, **kwargs: Any) -> None:
        """Classify a folder of images into a CSV in the checkpoint's run."""
        batches: Any = self.trainer.predict(model, datamodule=datamodule, **kwargs)
        source = Path(datamodule.hparams["predict_source"]).resolve()
        folder, name = runs.run_folder(kwargs["ckpt_path"]), source.name if source.is_dir() else source.stem
        runs.write_predictions(folder / f"predictions-{name}.csv", datamodule.predict_names, model, torch.cat(batches))


def run() -> None:
    """Run the command of `sys.argv`; a user's mistake ends in one message and exit code 1 or 2."""
    quiet()
    command, arguments = sys.argv[1], sys.argv[2:]
    alone = command in ("fit", "check", "tune", "sync")  # needs no checkpoint
    if arguments and not alone and not arguments[0].startswith("-"):
        arguments.insert(0, "--data.predict_source" if command == "predict" else "--ckpt_path")
    explicit = any(word.split("=")[0] in ("--ckpt_path", "--help", "-h", "--print_config") for word in arguments)
    with short_answers():
        if not alone and not explicit:
            arguments += ["--ckpt_path", str(runs.newest_best())]
        sys.argv[1:] = [command, *arguments]
        CLI(
            ClassificationTask,
            DataModule,
            save_config_callback=runs.RunFolder,
            trainer_class=Trainer,
            parser_class=Parser,
            seed_everything_default=42,
            auto_configure_optimizers=False,
            parser_kwargs={
                "prog": f"python -m {PACKAGE.name}",
                **{name: {"default_config_files": [str(RECIPE)]} for name in CLI.subcommands()},
            },
        )
