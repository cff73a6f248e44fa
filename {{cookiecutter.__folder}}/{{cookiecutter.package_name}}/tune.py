"""Which learning rate and which batch size suit, by short trials of Lightning's tuner."""

import logging
import math
import tempfile
import warnings

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.tuner import Tuner

from . import UserError


def steepest(lr: list[float], loss: list[float]) -> float | None:
    """The learning rate at which the loss falls most for the same relative change of the rate; None where it falls
    nowhere. Lightning's own suggestion looks at absolute changes, and so finds the smallest rates.

    Args:
        lr: Rates that were tried, rising.
        loss: The smoothed loss at each.
    """
    tried = [(math.log(rate), value) for rate, value in zip(lr, loss, strict=False) if math.isfinite(value)]
    start, width = len(tried) // 5, 5  # the smoothing needs some values to begin with
    slopes = [
        ((tried[row + width][1] - tried[row - width][1]) / (tried[row + width][0] - tried[row - width][0]), row)
        for row in range(max(start, width), len(tried) - width)
    ]
    slope, row = min(slopes, default=(0.0, 0))
    return math.exp(tried[row][0]) if slope < 0 else None


def tune(
    trainer: Trainer, model: LightningModule, datamodule: LightningDataModule, lr: bool = True, batch_size: bool = False
) -> None:
    """Try out learning rates, or batch sizes, and say which suits. Nothing is changed and no run is made.

    Args:
        lr: Whether to try learning rates from 1e-6 to 1, rising from batch to batch (arXiv:1506.01186).
        batch_size: Whether to try batch sizes, each twice the one before, until the device has no memory left.

    Raises:
        UserError: The trials say nothing.
    """
    datamodule.setup("fit")
    model.adopt(datamodule)  # type: ignore[operator]
    trainer.callbacks, trainer.logger, tuner = [], None, Tuner(trainer)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loaders, that the trials are short
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer._default_root_dir = folder  # where the tuner keeps the state to go back to
        if lr:
            found = tuner.lr_find(model, datamodule=datamodule, min_lr=1e-6, update_attr=False, attr_name="lr")
            suggestion = steepest(**found.results) if found else None
            if suggestion is None:
                raise UserError("The loss falls at no learning rate from 1e-6 to 1. Run `check --overfit true` first.")
            print(f"learning rate: the loss falls fastest at {suggestion:.2g}: --model.lr {suggestion:.2g}")
        if batch_size:
            smallest, most = 8, len(datamodule.splits["train"]) // trainer.world_size
            trials = max(1, int(math.log2(most / smallest)) + 1)
            largest = tuner.scale_batch_size(
                model, datamodule=datamodule, init_val=smallest, max_val=2 * most, max_trials=trials
            )
            print(f"batch size: {largest} fit into memory: --data.batch_size {largest}")
