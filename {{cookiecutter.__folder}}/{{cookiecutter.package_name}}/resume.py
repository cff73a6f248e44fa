"""Stopping and going on: when a resume point is written, and what it holds beside Lightning's own state."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from . import UserError
from .order import done_batches
from .stopped import Mark, goes_on


def agree(trainer: Trainer, *values: int) -> list[int]:
    """The largest of each value over all devices, so that these do the same."""
    if trainer.world_size == 1:
        return list(values)
    state = torch.tensor(values, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX)
    return [int(value) for value in state.tolist()]


@rank_zero_only
def requeue(trainer: Trainer) -> None:
    """Let SLURM start this job again, where the same command then goes on."""
    job = os.environ["SLURM_JOB_ID"]
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_info(f"warning: SLURM did not take the job {job} back: {error}. Submit it again; it goes on.")


class ResumePoint(Checkpoint):
    """Keeps `last.ckpt`, from which a stopped run goes on, and `previous.ckpt`, the one before.

    Written at each epoch's end, every few minutes within it, and on SIGTERM; but not between the batches of one
    accumulated step, nor after a batch that validation follows, for Lightning 2.6 would skip that on resuming.

    Args:
        minutes: Time between two resume points within an epoch; how much a kill can cost.
        dirpath: Folder; by default the run's.
    """

    def __init__(self, minutes: float = 10.0, dirpath: str | None = None) -> None:
        self.minutes, self.dirpath = minutes, dirpath
        self.saved = time.monotonic()
        self.mark: Mark | None = None  # of the run that it goes on with
        self.identity = ""
        self.unrecorded: dict[int, dict[str, float]] = {}  # step -> metrics that a kill may have kept from the logger
        self.same_run = False  # whether it goes on with what the same command began
        self.signum = 0  # of the signal that asks to stop

    def save(self, trainer: Trainer) -> None:
        last = Path(str(self.dirpath)) / "last.ckpt"
        if trainer.is_global_zero and last.is_file():
            link = last.with_name(".previous.ckpt.part")
            link.unlink(missing_ok=True)
            link.hardlink_to(last)  # so that at no moment there is none
            link.replace(last.with_name("previous.ckpt"))
        for logger in trainer.loggers:
            getattr(logger, "flush", lambda: None)()  # a resumed run records what comes after the point, and no more
        trainer.save_checkpoint(last, weights_only=False)  # the state of the optimizer as well
        self.saved = time.monotonic()

    def may_stop(self, trainer: Trainer) -> bool:
        """Whether training would go on exactly from here, within an epoch."""
        done, loop = done_batches(trainer), trainer.fit_loop
        within = 0 < done < trainer.num_training_batches and done % trainer.accumulate_grad_batches == 0
        return within and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and self.identity and self.mark is None:
            self.mark = Mark(Path(str(self.dirpath)).parent, self.identity)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            for step, metrics in self.unrecorded.items():  # which the logger leaves out if they are there after all
                logger.log_metrics(metrics, step)
        connector = trainer._signal_connector

        def stop(signum: int, _: Any) -> None:
            self.signum = signum
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the next one stops at once
            if trainer.world_size == 1 and not trainer.training:  # else where all devices can stop, and save
                connector.received_sigterm = True

        # Lightning is about to register these. Its own would wait, within the handler, for the other devices, which
        # need not have got the signal; and on SLURM save in the middle of a step.
        connector._sigterm_notifier_fn = connector._slurm_sigusr_handler_fn = stop  # type: ignore[method-assign]
        connector._register_signal(signal.SIGINT, stop)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            trainer._signal_connector._register_signal(signal.SIGINT, signal.default_int_handler)
            if agree(trainer, self.signum)[0]:  # it came after the last epoch
                raise SIGTERMException

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved = time.monotonic()
        stopped = [item for item in trainer.callbacks if isinstance(item, EarlyStopping) and item.stopped_epoch]
        if stopped and self.same_run:  # it was stopped after training, by a kill in what follows
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        signum, due = agree(trainer, self.signum, time.monotonic() - self.saved >= 60 * self.minutes)
        if signum and (self.may_stop(trainer) or trainer.world_size == 1 and trainer.is_last_batch):
            self.stop(trainer, signum)
        elif due and self.may_stop(trainer):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)
        if signum := agree(trainer, self.signum)[0]:
            self.stop(trainer, signum)

    def stop(self, trainer: Trainer, signum: int) -> None:
        """Once this hook is through. Else nothing is set here, for a signal may come at that very moment."""
        self.signum, trainer._signal_connector.received_sigterm = signum, True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + (self.signum or signal.SIGTERM)
            if trainer.training and self.may_stop(trainer):
                self.save(trainer)
            environment = trainer._accelerator_connector.cluster_environment
            if self.signum and self.signum == getattr(environment, "requeue_signal", None):  # SLURM
                requeue(trainer)
        self.end(ended=not goes_on(exception))

    def end(self, ended: bool = True) -> None:
        if self.mark:
            self.mark.release(ended)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note what the epoch's metrics have counted so far, on each device: (world_size, ...) each; and at an epoch's
        end its metrics, which Lightning records after the resume point is written."""
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and trainer.training:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1
            values = {name: float(value) for name, value in trainer._logger_connector.metrics["log"].items()}
            checkpoint["unrecorded"] = {step: {**values, "epoch": trainer.current_epoch}}
        metrics: Any = pl_module.train_metrics
        list(metrics.items())  # shares the state of metrics that are computed together
        metrics.persistent(True)
        state = {key: value.detach().clone() for key, value in metrics.state_dict().items()}
        metrics.persistent(False)
        gathered = {key: trainer.strategy.all_gather(value) for key, value in state.items()}  # as it is for one device
        checkpoint["train_metrics"] = {key: value.reshape(-1, *state[key].shape) for key, value in gathered.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        self.unrecorded = checkpoint.get("unrecorded", {})
        states, metrics = checkpoint.get("train_metrics", {}), pl_module.train_metrics
        if any(len(value) != trainer.world_size for value in states.values()):
            raise UserError(
                f"This resume point was written on {len(next(iter(states.values())))} devices, and the run now has "
                f"{trainer.world_size}: they would draw other samples. Set --trainer.devices as it was, or train anew."
            )
        metrics.persistent(True)  # type: ignore[union-attr, operator]
        metrics.load_state_dict({key: value[trainer.global_rank] for key, value in states.items()}, strict=False)  # type: ignore[union-attr, operator]
        metrics.persistent(False)  # type: ignore[union-attr, operator]
