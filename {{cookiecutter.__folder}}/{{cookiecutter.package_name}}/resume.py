"""Stopping and going on: when a resume point is written, and how it reaches the disk."""

import errno
import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.utilities.exceptions import SIGTERMException

from . import NoRoom, UserError
from .order import done_batches
from .runs import checkpoint_options
from .stopped import STOPS, Mark

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES}


class DurableIO(TorchCheckpointIO):
    """Leaves the old file or the new one, whatever happens: written beside the target, flushed to disk, renamed.
    Lightning's own goes through TMPDIR, and destroys the old file where that is another file system."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Raises:
        NoRoom: The disk is full, a limit is reached, or the folder can't be written to.
        UserError: A weight is NaN or infinite.
        """
        target, buffer = Path(path), io.BytesIO()
        for name, value in checkpoint.get("state_dict", {}).items():
            if not torch.isfinite(value).all():  # nothing that is spoilt may take the place of what is good
                raise UserError(
                    f"{name} holds NaN or infinity, so {target.name} is not written; what was written before is good. "
                    "Lower model.lr."
                )
        torch.save(checkpoint, buffer)  # first, because PyTorch hides why it could not write a file
        part = target.with_name(f".{target.name}.part")  # takes the place of one that a killed process left
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno not in FULL:
                raise
            if part.exists():
                part.unlink()
            still = "its older version is still good" if target.exists() else "there is no older version of it"
            raise NoRoom(
                f"{target} can't be written: {os.strerror(error.errno)}; {still}. It needs "
                f"{len(buffer.getbuffer()) / 2**20:.1f} MB: free them, or allow writing there."
            ) from error


class ResumePoint(Checkpoint):
    """Keeps `last.ckpt`, from which a stopped run goes on, and `previous.ckpt`, the one before.

    Written at each epoch's end, every few minutes within it, and on SIGTERM; but not after an epoch's last batch, for
    Lightning 2.6 would then skip its validation on resuming, nor between the batches of one accumulated step.

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
        self.signum = signal.SIGTERM

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
        done = done_batches(trainer)
        return 0 < done < trainer.num_training_batches and done % trainer.accumulate_grad_batches == 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and self.identity and self.mark is None:
            self.mark = Mark(Path(str(self.dirpath)).parent, self.identity)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            for step, metrics in self.unrecorded.items():  # which the logger leaves out if they are there after all
                logger.log_metrics(metrics, step)
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():

            def interrupt(signum: int, _: Any) -> None:
                self.signum = signal.Signals(signum)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # the next one stops at once
                trainer._signal_connector.received_sigterm = True  # stops as SIGTERM does: after this batch

            signal.signal(signal.SIGINT, interrupt)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved = time.monotonic()
        stopped = [item for item in trainer.callbacks if isinstance(item, EarlyStopping) and item.stopped_epoch]
        if stopped and self.same_run:  # it was stopped after training, by a kill in what follows
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = trainer.strategy.broadcast(time.monotonic() - self.saved >= 60 * self.minutes)  # all ranks, or none
        if due and self.may_stop(trainer):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + self.signum
            if trainer.training and self.may_stop(trainer):
                self.save(trainer)
        self.end(ended=not isinstance(exception, STOPS))  # one that failed is: the same command would fail again

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
        gathered = {key: trainer.strategy.all_gather(value) for key, value in state.items()}
        checkpoint["train_metrics"] = {
            key: value if trainer.world_size > 1 else value.unsqueeze(0) for key, value in gathered.items()
        }

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


def refuse_mixing(checkpoint: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuse to go on with other options than before: Lightning would take the old ones, or draw other samples from
    here on, without a word.

    Args:
        checkpoint: Where training goes on.
        options: Those of now, of the sections `model` and `data`.
    """
    for section, now in options.items():
        for key, old in checkpoint_options(checkpoint)[section].items():
            if key not in ("compile", "source", "cache_gb") and now.get(key, old) != old:
                raise UserError(
                    f"{section}.{key} is {now[key]!r}, but {old!r} in the checkpoint, which a resumed run keeps. Leave "
                    "it out, or train anew."
                )
