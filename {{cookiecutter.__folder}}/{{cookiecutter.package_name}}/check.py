"""Before the first epoch: looks at one batch of each split and tries what comes at the end of a run."""

import copy
import math
import time
from collections import Counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from . import UserError


def check(trainer: L.Trainer, model: L.LightningModule, datamodule: L.LightningDataModule) -> None:
    """Look for whatever could spoil a run, without training.

    Prints what it sees. A callback that has a method `rehearse(task, datamodule) -> str` is tried out too.

    Raises:
        UserError: Something must be put right first; names everything that was found.
    """
    with isolate_rng():  # a run with the check and one without it must give the same weights
        datamodule.setup("fit")
        task = copy.deepcopy(model)
        task.adopt(datamodule)
        faults = [
            *check_labels(datamodule),
            *check_batch(task, datamodule, "train"),
            *check_batch(task, datamodule, "val"),
        ]
        if faults:
            raise UserError("\n".join([f"check found {len(faults)} to put right before training:", *faults]))
        for callback in trainer.callbacks:
            if rehearse := getattr(callback, "rehearse", None):
                start = time.perf_counter()
                print(f"  {rehearse(task.eval(), datamodule)} ({time.perf_counter() - start:.1f} s)", flush=True)


def check_labels(datamodule: L.LightningDataModule) -> list[str]:
    """Print how many samples of each class the splits hold, and find labels out of range and classes without samples."""
    faults = []
    classes = datamodule.classes
    print(
        f"check {datamodule.hparams['source']}: {len(classes)} classes, data {datamodule.fingerprint['data_hash'][:12]}"
    )
    for name, split in datamodule.splits.items():
        counts = Counter(split.labels[split.rows].tolist())
        largest, smallest = max(counts.values()), min(counts.values())
        print(f"  {name:6}{len(split):7,} samples, {smallest:,} to {largest:,} of each class")
        outside = sorted(label for label in counts if not 0 <= label < len(classes))
        if outside:
            faults.append(
                f"{name}: labels {outside}, expected 0 to {len(classes) - 1}. Correct the labels in sources.py."
            )
        missing = [class_name for label, class_name in enumerate(classes) if label not in counts]
        if missing and name == "train":
            faults.append(f"{name}: no sample of {missing}. Add some, or take the class out.")
        elif missing:
            print(f"  warning: {name} has no sample of {missing}; its metrics say nothing of them")
    return faults


def check_batch(task: Any, datamodule: L.LightningDataModule, name: str) -> list[str]:
    """Print the shape, dtype and range of a split's first batch and the untrained loss; find what can't be right."""
    loader = datamodule.train_dataloader() if name == "train" else datamodule.val_dataloader()
    inputs, targets = next(iter(loader))
    faults = []
    spec = datamodule.input_spec
    if list(inputs.shape[1:]) != spec["shape"] or str(inputs.dtype) != f"torch.{spec['dtype']}":
        faults.append(
            f"{name}: inputs are {describe(inputs)}, expected (B, {spec['shape']}) {spec['dtype']}. See data.py."
        )
    if not torch.isfinite(inputs.float()).all():
        faults.append(f"{name}: inputs hold NaN or infinity. See data.py.")
    elif inputs.min() == inputs.max():
        faults.append(f"{name}: every input value of the batch is {inputs.min().item()}. See data.py.")
    if faults:
        return faults
    with torch.no_grad():
        loss = float(task.eval().loss(task(inputs), targets))
    print(f"  {name:6}batch: inputs {describe(inputs)}; targets {describe(targets)}; untrained loss {loss:.3f}", end="")
    print(f" (chance: ln {len(datamodule.classes)} = {math.log(len(datamodule.classes)):.3f})")
    if not math.isfinite(loss):
        faults.append(f"{name}: the untrained network's loss is {loss}. Look at the network and the loss.")
    return faults


def describe(tensor: Tensor) -> str:
    """Shape, dtype and range of a tensor, for people."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} in [{tensor.min().item():g}, {tensor.max().item():g}]"
