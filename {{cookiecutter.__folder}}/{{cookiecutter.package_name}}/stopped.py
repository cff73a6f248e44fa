"""Runs that were stopped before their end: how they are marked, and how the same command finds them and goes on."""

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from . import PACKAGE, DamagedFile, NoRoom, UserError, runs
from .checkpoints import load_checkpoint
from .images import combine_hashes, file_hash
from .store import StoreAway, StoreError
from .tracking import KEPT, NOTE, UNSENT, MLflowRun


def identity(options: dict[str, Any]) -> str:
    """Equal for runs that have the same resolved options, the number of workers aside, and the same code."""
    own = {key: value for key, value in options.items() if key not in ("ckpt_path", "resume")}
    own["data"] = {key: value for key, value in options["data"].items() if key != "num_workers"}
    code = [file_hash(path) for path in sorted(PACKAGE.glob("*.py"))]
    return combine_hashes([json.dumps(own, sort_keys=True, default=str), *code])


def goes_on(error: BaseException) -> bool:
    """Whether the same command may come further: after all but a mistake of the user's, even a device that failed."""
    return isinstance(error, NoRoom) or not isinstance(error, (UserError, MisconfigurationException))


class StillRunning(UserError):
    """Another process is at work on a run."""


class Mark:
    """The file `unfinished` in a run's folder, there from the start of the run to its end, with the run's identity.
    While the run's process lives, it is locked, by a lock that workers do not inherit and a kill takes away. Raises
    StillRunning where another process is at work on this run."""

    def __init__(self, folder: Path, identity: str) -> None:
        self.path = folder / "unfinished"
        self.file = self.path.open("a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.file.close()
            raise StillRunning(f"The run {folder.name} is still being trained, by another process.") from error
        self.file.seek(0)  # and by this file alone: closing another one on it would let go of the lock
        if self.file.read() != identity:  # else left alone: another device's process may be reading it
            self.file.truncate(0)
            self.file.write(identity)
            self.file.flush()

    def release(self, ended: bool) -> None:
        """Let go of the run, and take the mark away if it has come to its end."""
        if ended:
            self.path.unlink(missing_ok=True)
        self.file.close()


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Where no batch is on its way, SIGTERM stops at once, and in order: as an exception."""

    def stop(*_: Any) -> None:
        raise SIGTERMException

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def usable_point(folder: Path) -> Path | None:
    """The newest resume point in a run's folder that is whole; a damaged one is named, and the one before it taken.

    Raises:
        UserError: One holds more than plain data, and is not read.
    """
    for name in ("last.ckpt", "previous.ckpt"):
        path = folder / "checkpoints" / name
        if path.is_file():
            try:
                load_checkpoint(str(path))
                return path
            except DamagedFile as error:
                rank_zero_info(f"{error} The resume point before it is tried.")
    return None


def stopped_run(own: str) -> tuple[Mark | None, Path] | None:
    """The newest stopped run of this identity that can go on: its mark, taken, and its resume point."""
    first = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0  # others go where this one leads
    for path in sorted(runs.RUNS.glob("*/unfinished"), reverse=True):
        try:
            if path.read_text() == own and (point := usable_point(path.parent)):
                return Mark(path.parent, own) if first else None, point
        except (FileNotFoundError, StillRunning):  # its process has just ended it, or goes on with it
            continue
    return None


def complete(run: MLflowRun, folder: Path, dead: bool, anywhere: bool) -> bool:
    """Send what the store has not got of an earlier run; returns whether there was something.

    Args:
        run: Knows the store.
        folder: That of the earlier run.
        dead: Whether its process is gone, though it did not come to its end.
        anywhere: Whether it may be sent to another store than it was meant for.
    """
    other, note, kept = MLflowRun(tracking_uri=run.experiment.tracking_uri), folder / NOTE, (folder / UNSENT).is_file()
    other.use_folder(folder, ended=True)
    if dead and (kept or note.is_file() and run.experiment.get_run(note.read_text()).info.status == "RUNNING"):
        other.outbox["status"] = "KILLED"
    elsewhere = not note.is_file() and other.outbox["uri"] != run.outbox["uri"]
    if not other.outbox["status"] or elsewhere and not anywhere:  # without one, its process may still be at work
        return False
    count = len(other.outbox["points"])
    other.send(patient=True)  # as much as the caller is
    if kept:
        rank_zero_info(f"MLflow has got {count:,} points of {folder.name}, which it did not take at the time.")
    return kept


@rank_zero_only
def tidy_store(run: MLflowRun, own: Mark | None, patient: bool = False) -> int:
    """Send what the store has not got of earlier runs, and let those whose process is gone count as KILLED, where they
    would be RUNNING for ever. Returns of how many runs something was sent.

    Args:
        run: Knows the store.
        own: The mark of the run that this process goes on with.
        patient: Whether the store has its time, and may be another one than the runs were meant for.

    Raises:
        StoreAway: `patient`, and the store does not answer.
    """
    count = 0
    for folder in sorted({path.parent for name in ("unfinished", UNSENT) for path in runs.RUNS.glob(f"*/{name}")}):
        path, mark = folder / "unfinished", None
        if own and own.path == path:
            continue
        try:
            mark = Mark(folder, path.read_text()) if path.exists() else None
            # A lock of its own: while much is sent, runs that start need the store's.
            with run.asking(patient), FileLock(runs.ROOT / ".mlflow.sync.lock"):
                count += complete(run, folder, dead=mark is not None, anywhere=patient)
        except (StillRunning, FileNotFoundError):  # of a process that lives, or has just ended
            continue
        except StoreAway as error:
            if patient:
                raise
            rank_zero_info(f"warning: {error} {KEPT}")
            break
        except StoreError as error:  # a run of another store
            rank_zero_info(f"warning: {folder.name} is left as it is: {error}")
        finally:
            if mark:
                mark.release(ended=False)
    return count


def sync(trainer: Trainer, model: LightningModule, datamodule: LightningDataModule) -> None:
    """Send what MLflow has not got of earlier runs, because it did not answer at the time."""
    if not isinstance(trainer.logger, MLflowRun):
        raise UserError("sync needs MLflow: leave out --trainer.logger.")
    if not tidy_store(trainer.logger, None, patient=True):
        print("MLflow has got everything.")
