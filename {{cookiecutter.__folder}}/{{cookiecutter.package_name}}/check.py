"""Before the first epoch: looks at one batch of each split and tries out what comes at the end of a run."""

import copy
import math
import time
from collections import Counter
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from . import UserError


@rank_zero_only
def check(trainer: Trainer, model: LightningModule, datamodule: LightningDataModule) -> None:
    """Look for whatever could spoil a run, without training.

    A callback with a method `rehearse(trainer, task, datamodule) -> str` is tried out with the untrained network.

    Raises:
        UserError: Something must be put right first; names everything that was found.
    """
    with isolate_rng():  # a run with the check and one without it must give the same weights
        datamodule.setup("fit")
        task: Any = copy.deepcopy(model).eval()
        task.adopt(datamodule)
        faults = check_labels(datamodule)
        faults += check_batch(task, datamodule, "train", datamodule.train_dataloader())
        faults += check_batch(task, datamodule, "val", datamodule.val_dataloader())
        if faults:
            raise UserError("\n".join([f"check found {len(faults)} to put right before training:", *faults]))
        for callback in trainer.callbacks:
            if rehearse := getattr(callback, "rehearse", None):
                start = time.perf_counter()
                outcome = rehearse(trainer, task.eval(), datamodule)
                print(f"  {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)


def check_labels(datamodule: LightningDataModule) -> list[str]:
    """Print how many samples of each class the splits hold; return labels out of range and classes without samples."""
    faults = []
    classes, data_hash = datamodule.classes, datamodule.fingerprint["data_hash"]
    print(f"check {datamodule.hparams['source']}: {len(classes)} classes, data hash {data_hash[:12]}")
    for name, split in datamodule.splits.items():
        if len(split) == 0:
            faults.append(f"{name}: the split is empty. Add samples.")
            continue
        counts = Counter(split.labels[split.rows].tolist())
        print(f"  {name:6}{len(split):7,} samples, {min(counts.values()):,} to {max(counts.values()):,} of each class")
        if outside := sorted(label for label in counts if not 0 <= label < len(classes)):
            faults.append(f"{name}: labels {outside}, expected 0 to {len(classes) - 1}. Correct them in sources.py.")
        missing = [class_name for label, class_name in enumerate(classes) if label not in counts]
        if missing and name == "train":
            faults.append(f"{name}: no sample of {missing}. Add some, or take the class out.")
        elif missing:
            print(f"  warning: {name} has no sample of {missing}; its metrics say nothing of them")
    return faults


def check_batch(task: Any, datamodule: LightningDataModule, name: str, loader: Any) -> list[str]:
    """Print shapes, dtypes and ranges of the first batch and the untrained loss; return what can't be right."""
    if len(loader) == 0:
        return []  # an empty split, which the labels' own check has named
    inputs, targets = next(iter(loader))
    shape, dtype = datamodule.input_spec["shape"], datamodule.input_spec["dtype"]
    if list(inputs.shape[1:]) != shape or inputs.dtype != getattr(torch, dtype):
        return [f"{name}: inputs are {describe(inputs)}, expected (B, *{shape}) {dtype}. See data.py."]
    if not torch.isfinite(inputs.float()).all():
        return [f"{name}: inputs hold NaN or infinity. See data.py."]
    if inputs.min() == inputs.max():
        return [f"{name}: every input value of the batch is {inputs.min().item()}. See data.py."]
    if targets.min() < 0 or targets.max() >= len(datamodule.classes):
        return []  # the labels' own check has named it
    with torch.no_grad():
        loss = float(task.loss(task(inputs), targets))
    chance = math.log(len(datamodule.classes))
    print(f"  {name:6}inputs {describe(inputs)}; targets {describe(targets)}; loss {loss:.3f}, by chance {chance:.3f}")
    return [] if math.isfinite(loss) else [f"{name}: the untrained network's loss is {loss}. See model.py and task.py."]


def describe(tensor: Tensor) -> str:
    """Shape, dtype and range of a tensor, for people."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} in [{tensor.min().item():g}, {tensor.max().item():g}]"
