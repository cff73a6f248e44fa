"""Checkpoint files: how they reach the disk, how they are read, and what they say of how they were trained."""

import errno
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from . import DamagedFile, NoRoom, UserError
from .images import replace_file

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
        for part in target.parent.glob(f".{target.name}.*.part"):  # that a killed process left
            part.unlink(missing_ok=True)
        try:
            replace_file(target, buffer.getbuffer())
        except OSError as error:
            if error.errno not in FULL:
                raise
            still = "its older version is still good" if target.exists() else "there is no older version of it"
            raise NoRoom(
                f"{target} can't be written: {os.strerror(error.errno)}; {still}. It needs "
                f"{len(buffer.getbuffer()) / 2**20:.1f} MB: free them, or allow writing there."
            ) from error


def load_checkpoint(path: str) -> dict[str, Any]:
    """A checkpoint's content, read without running any code in it.

    Raises:
        DamagedFile: It is not as it was written.
        UserError: It is missing, of something else, or holds objects that could run code.
    """
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not compare the checksums
            if entry := file.testzip():
                raise zipfile.BadZipFile(f"wrong checksum of {entry}")
    except Exception as error:  # a damaged file raises one of many kinds
        kind = UserError if isinstance(error, FileNotFoundError) else DamagedFile
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise kind(f"{path} can't be read as a checkpoint: {reason[:200]}.") from error
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path} is whole, but can't be read as a checkpoint: {reason[:200]}") from error
    if not {"hyper_parameters", "datamodule_hyper_parameters"} <= checkpoint.keys():
        raise UserError(f"{path} has no hyperparameters: it is no checkpoint of this project's `fit`.")
    return checkpoint


def checkpoint_options(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The options, nested as in the recipe, that a checkpoint was trained with; not those of its machine and call."""
    model, data = checkpoint["hyper_parameters"], checkpoint["datamodule_hyper_parameters"]
    other = {"num_workers", "data_dir", "cache_dir", "predict_source", "seed"}
    return {
        "seed_everything": data["seed"],
        "model": {key: value for key, value in model.items() if key[0] != "_"},
        "data": {key: value for key, value in data.items() if key[0] != "_" and key not in other},
    }


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
