"""Before the first epoch: looks at data and network, and tries out what comes at the end of a run."""

import copy
import math
import shutil
import time
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from . import ROOT, DataFaults, UserError
from .picture import picture
from .speed import speed

MEMORIZE_STEPS = 200  # the default network needs about 30 for a batch of digits


@rank_zero_only
def check(
    trainer: Trainer,
    model: LightningModule,
    datamodule: LightningDataModule,
    overfit: bool = False,
    price_per_hour: float | None = None,
) -> None:
    """Look for whatever could spoil a run, without training.

    A callback with a method `rehearse(trainer, task, datamodule) -> str` is tried out with the untrained network.

    Args:
        overfit: Whether to see that the network can learn one batch by heart.
        price_per_hour: Price of the machine; what the run will cost, and what would be cheaper, is then said.

    Raises:
        UserError: Something must be put right first; names everything that was found.
    """
    with isolate_rng():  # a run with the check and one without it must give the same weights
        faults: list[str] = []
        try:
            datamodule.setup("fit")
        except DataFaults as error:  # everything is set up all the same, so that more can be said at once
            faults += error.faults
        data_hash = datamodule.fingerprint["data_hash"][:12]
        print(f"check {datamodule.hparams['source']}: {len(datamodule.classes)} classes, data hash {data_hash}")
        print(*(f"  {line}\n" for line in datamodule.report), sep="", end="")
        faults += check_labels(datamodule)
        try:
            loaders = {"train": datamodule.train_dataloader(), "val": datamodule.val_dataloader()}
        except UserError as error:
            faults.append(str(error))
        refuse(faults)
        task: Any = copy.deepcopy(model)
        task.adopt(datamodule)
        batches = {name: next(iter(loader)) for name, loader in loaders.items()}
        raw, batches["train"] = batches["train"], datamodule.augment(batches["train"])
        try:
            faults += [fault for name, batch in batches.items() for fault in check_batch(task, datamodule, name, batch)]
            refuse(faults)
            faults += check_gradients(task, batches["train"])
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError) as error:  # what a network may raise
            raise UserError(f"The network fails on a batch: {error} See model.py, or --model.backbone.") from error
        refuse(faults + check_passes(loaders, {**batches, "train": raw}) + check_disk(task))
        if content := picture(batches["train"][0], batches["train"][1], datamodule.classes):
            datamodule.documents["train_batch.png"] = content
        for callback in trainer.callbacks:
            if rehearse := getattr(callback, "rehearse", None):
                start = time.perf_counter()
                outcome = rehearse(trainer, task.eval(), datamodule)
                print(f"  {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
        print(*speed(trainer, task, datamodule, loaders["train"], raw, price_per_hour), sep="\n", flush=True)
        if overfit:
            refuse(check_memory(task, batches["train"]))


def refuse(faults: list[str]) -> None:
    if faults:
        raise DataFaults(faults)


def check_labels(datamodule: LightningDataModule) -> list[str]:
    """Print how many samples of each class the splits hold; return what can't be right with their labels."""
    faults: list[str] = []
    classes, several = datamodule.classes, datamodule.task == "multilabel"
    for name, split in datamodule.splits.items():
        labels, chosen = split.labels[split.rows], torch.arange(len(classes))
        if len(split) == 0:
            faults.append(f"{name}: the split is empty. Add samples.")
            continue
        if labels.is_floating_point():
            print(f"  {name:6}{len(split):7,} samples, numbers from {labels.min():g} to {labels.max():g}")
            faults += [f"{name}: some are NaN or infinite. Take these samples out."] * (not labels.isfinite().all())
            continue
        outside = sorted({*labels.unique().tolist()} - {*(range(2) if several else range(len(classes)))})
        if outside:
            faults.append(f"{name}: labels {outside}, expected 0 to {len(classes) - 1}. Correct them in sources.py.")
        marks = labels if several else labels[:, None] == chosen
        counts = marks.sum(dim=0)
        print(f"  {name:6}{len(split):7,} samples, {counts.min():,} to {counts.max():,} of each class")
        missing = [classes[row] for row in chosen[counts == 0].tolist()]
        if missing and name == "train":
            faults.append(f"{name}: no sample of {missing}. Add some, or take the class out.")
        elif missing:
            print(f"  warning: {name} has no sample of {missing}; its metrics say nothing of them")
        if several:
            if always := [classes[row] for row in chosen[counts == len(split)].tolist()]:
                faults.append(f"{name}: every sample has the labels {always}. Take them out: they teach nothing.")
            for words, total in (("no label", 0), ("every label", len(classes))):
                if count := int((marks.sum(dim=1) == total).sum()):
                    print(f"  warning: {count:,} samples of {name} have {words}")
    return faults


def check_batch(task: Any, datamodule: LightningDataModule, name: str, batch: tuple[Tensor, Tensor]) -> list[str]:
    """Print shapes, dtypes and ranges of a batch, as the network gets it, and the untrained loss; return what can't be
    right."""
    inputs, targets = batch
    spec = datamodule.input_spec
    if list(inputs.shape[1:]) != spec["shape"] or inputs.dtype != getattr(torch, spec["dtype"]):
        return [f"{name}: inputs are {describe(inputs)}, expected (B, *{spec['shape']}) {spec['dtype']}. See data.py."]
    if not torch.isfinite(inputs.float()).all():
        return [f"{name}: inputs hold NaN or infinity. See data.py."]
    if inputs.min() == inputs.max():
        return [f"{name}: every input value of the batch is {inputs.min().item()}. See data.py."]
    print(f"  {name:6}inputs {describe(inputs)}; targets {describe(targets)}")
    if normalize := getattr(task.network, "normalize", None):
        normalized = normalize(inputs)
        print(f"        normalized: mean {normalized.mean():.2f}, deviation {normalized.std():.2f}")
        if normalized.mean().abs() > 3 or not 0.1 < normalized.std() < 10:
            return [f"{name}: that is far from mean 0 and deviation 1. See the statistics in data.py."]
    with torch.no_grad():
        loss = float(task.eval().loss(task(inputs), targets))
    chance = {"multiclass": math.log(len(datamodule.classes)), "multilabel": math.log(2)}.get(datamodule.task)
    print(f"        loss {loss:.3f}" + (f", by chance {chance:.3f}" if chance else ""))
    if not math.isfinite(loss):
        return [f"{name}: the untrained network's loss is {loss}. See model.py and task.py."]
    if chance and not chance / 3 < loss < 3 * chance:
        print("  warning: that is far from chance. See the last layer in model.py and the loss in task.py.")
    return []


def check_passes(loaders: dict[str, Any], batches: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Validation must be the same at every pass, and the order of training must not; `batches` are the first ones."""
    faults = []
    again = next(iter(loaders["val"]))
    if not all(torch.equal(one, two) for one, two in zip(again, batches["val"], strict=True)):
        faults.append("val: two passes give different batches. Take what is random out of validation; see data.py.")
    loaders["train"].sampler.set_epoch(1)
    if len(loaders["train"]) > 1 and torch.equal(next(iter(loaders["train"]))[0], batches["train"][0]):
        faults.append("train: two epochs begin with the same batch. Shuffle the training split; see data.py.")
    loaders["train"].sampler.set_epoch(0)
    return faults


def check_gradients(task: Any, batch: tuple[Tensor, Tensor]) -> list[str]:
    """Every parameter that is to be trained must be reached by the loss."""
    task = copy.deepcopy(task).train()
    loss = task.loss(task(batch[0]), batch[1])
    if not loss.requires_grad:
        return ["The loss depends on no parameter that could be trained. See forward in model.py."]
    loss.backward()
    missing = [name for name, value in task.named_parameters() if value.requires_grad and value.grad is None]
    return [f"No gradient reaches {missing}. Use them in forward, or freeze them; see model.py."] * bool(missing)


def check_disk(task: Any, free: int | None = None) -> list[str]:
    """There must be room for the checkpoints: weights and two moments of each, best and last, and one being written."""
    needed = 3 * 3 * sum(value.numel() * value.element_size() for value in task.parameters())
    free = shutil.disk_usage(ROOT).free if free is None else free
    if free > needed:
        return []
    return [f"Checkpoints need {needed / 2**30:.3g} GiB in {ROOT}, {free / 2**30:.3g} are free. Make room there."]


def check_memory(task: Any, batch: tuple[Tensor, Tensor]) -> list[str]:
    """A sound network, loss and data let one batch be learned by heart."""
    inputs, targets = batch
    task = copy.deepcopy(task).train()
    optimizer = torch.optim.AdamW(task.parameters(), lr=task.hparams["lr"])
    losses: list[float] = []
    while len(losses) < MEMORIZE_STEPS:
        loss = task.loss(task(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if losses[-1] < losses[0] / 10:
            print(f"  a batch of {len(inputs)} is learned by heart in {len(losses)} steps")
            return []
    return [
        f"A batch of {len(inputs)} is not learned by heart in {MEMORIZE_STEPS} steps: loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}. See forward in model.py, the loss in task.py, and whether labels belong to their samples."
    ]


def describe(tensor: Tensor) -> str:
    """Shape, dtype and range of a tensor, for people."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} in [{tensor.min().item():g}, {tensor.max().item():g}]"
