"""What the curves of a training say while it runs: overfitting, or nothing learned."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info


class Curves(Checkpoint):
    """Says in one line when the network overfits, and when validation never got better.

    Called like a checkpoint, because the metrics of an epoch are there only then.

    Args:
        patience: Epochs in a row in which `val_loss - train_loss` has to grow to be called overfitting.
    """

    def __init__(self, patience: int = 5) -> None:
        self.patience = patience
        self.losses: list[list[float]] = []  # of each epoch: training, validation
        self.said = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        if not {"train_loss", "val_loss"} <= metrics.keys():
            return
        self.losses.append([float(metrics["train_loss"]), float(metrics["val_loss"])])
        gaps = [val - train for train, val in self.losses[-self.patience - 1 :]]
        growing = len(gaps) > self.patience and all(gap > before for before, gap in zip(gaps, gaps[1:], strict=False))
        best = min(val for _, val in self.losses)
        train, val = self.losses[-1]
        if growing and val > best and not self.said:
            self.said = True
            rank_zero_info(
                f"overfitting: for {self.patience} epochs train_loss ({train:.4f}) and val_loss ({val:.4f}, at best "
                f"{best:.4f}) have moved apart. More augmentation, dropout or data, or a smaller network, may help."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        vals = [val for _, val in self.losses]
        if len(vals) > 2 and min(vals) == vals[0]:
            rank_zero_info(
                f"val_loss never improved after the first epoch ({vals[0]:.4f}). Lower model.lr, and look at the data "
                "and its labels: `check --overfit true`."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "said": self.said}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses, self.said = state_dict["losses"], state_dict["said"]
