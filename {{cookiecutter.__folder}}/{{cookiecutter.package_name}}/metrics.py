"""How predictions are judged, and what errors cost. Add a metric here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelF1Score,
)

from . import UserError

THRESHOLDS = 200  # of the curve that AUROC is the area of; all of them would need every prediction in memory


@contextmanager
def counting() -> Iterator[None]:
    """For adding batches to metrics. In deterministic mode, torchmetrics counts by comparing each prediction with each
    bin, which takes gigabytes; whole numbers add up to the same in any order."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def make_metrics(task: str, num_classes: int, split: str) -> MetricCollection:
    """Metrics of one split, under the names `{split}_loss`, `{split}_acc`, ...; of training the cheap ones alone.

    Each receives, by name, those it asks for of: `value`, (B,) the batch's mean loss, so that losses are averaged over
    samples; `preds` (B, K) logits; and `target` (B,), or for multi-label (B, K), int64.

    Args:
        task: `multiclass` or `multilabel`.
        num_classes: K.
        split: `train`, `val` or `test`.
    """
    # Labels are checked once, before training. Checking them in each batch would make a GPU wait.
    fast: dict[str, Any] = {"validate_args": False}
    metrics: dict[str, Metric | MetricCollection] = {"loss": MeanMetric(nan_strategy="disable")}
    if task == "multilabel":
        metrics["acc"] = MultilabelAccuracy(num_classes, average="micro", **fast)
        if split != "train":
            metrics["acc_per_class"] = MultilabelAccuracy(num_classes, average=None, **fast)
            metrics["f1"] = MultilabelF1Score(num_classes, average="macro", **fast)
            metrics["auroc"] = MultilabelAUROC(num_classes, thresholds=THRESHOLDS, **fast)
    else:
        metrics["acc"] = MulticlassAccuracy(num_classes, average="micro", **fast)
        if split != "train":
            metrics["acc_per_class"] = MulticlassAccuracy(num_classes, average=None, **fast)
            metrics["f1"] = MulticlassF1Score(num_classes, average="macro", **fast)
            metrics["auroc"] = MulticlassAUROC(num_classes, thresholds=THRESHOLDS, **fast)
            metrics["ece"] = MulticlassCalibrationError(num_classes, **fast)  # expected calibration error, in 15 bins
    return MetricCollection(metrics, prefix=f"{split}_")


def update(metrics: MetricCollection, task: str, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
    """Add a batch: its mean loss, its logits (B, K), and its targets as the loss takes them."""
    if task == "multilabel":
        targets = (targets >= 0.5).long()
    elif targets.ndim == 2:
        targets = targets.argmax(dim=1)  # of a mixed sample, the larger share
    with counting():
        # Once for each sample, for torchmetrics 1.9 forgets weights where it lets NaN pass.
        metrics.update(value=loss.expand(len(targets)), preds=logits, target=targets)


def scalars(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those metrics that are one number, and not one for each class."""
    return {name: value for name, value in values.items() if value.ndim == 0}


def choose_weights(choice: str | list[float], balance: list[float], num_classes: int) -> Tensor | None:
    """(K,) float32 weights of the classes in the training loss, or None where they all count 1.

    Args:
        choice: `none`; `auto` for `balance`; or K numbers.
        balance: Weights with which all classes count alike.
        num_classes: K.

    Raises:
        UserError: There is not one number above 0 for each class.
    """
    if choice == "none":
        return None
    weights = balance if choice == "auto" else choice
    if not isinstance(weights, list) or len(weights) != num_classes or min(weights) <= 0:
        raise UserError(f"model.class_weights is {choice}; expected auto, none or {num_classes} numbers above 0.")
    return torch.tensor(weights, dtype=torch.float32)
