"""What is learned: the loss, and what happens to a batch in training, validation, test and prediction."""

import math
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection

from . import UserError, optim, refuse_outside
from .metrics import choose_weights, make_metrics, scalars, update
from .model import make_network
from .optim import freeze, stages

Batch = tuple[Tensor, Tensor]

RANGES = optim.RANGES | {"width": (1, 2**14), "dropout": (0, 0.99), "label_smoothing": (0, 0.99)}
RANGES |= {"unfreeze_every": (0, 1e6)}


class ClassificationTask(LightningModule):
    """Trains a network to tell K classes apart, or to say of each of K labels whether it holds. Every argument is an
    option, and lies in the checkpoint.

    Args:
        backbone: `small` or `mlp` of model.py, a network of torchvision's such as `resnet18`, or `timm/NAME`.
        pretrained: Whether a backbone starts with weights trained on ImageNet, and with their normalisation; or the
            path of a checkpoint of this project, to start with all but its head.
        compile: Whether torch.compile makes the network faster; checkpoints do not change.
        width: Channels of the small network's first block; an eighth of the hidden units of `mlp`.
        dropout: Share of the features that is dropped before the last layer, in training.
        optimizer: `adamw`, `adam`, `sgd` (Nesterov), `lion` (package lion-pytorch), or a class of torch.optim.
        lr: Peak learning rate, of the head.
        momentum: Of `sgd`.
        backbone_lr_factor: Learning rate of all before the head, as a share of `lr`.
        layer_decay: Further factor on it for each stage on the way from the head to the inputs.
        unfreeze_every: Stages start frozen and are freed from the last on, one every so many epochs; 0 freezes none.
        weight_decay: Decay of kernels and matrices; biases and norm layers have none.
        schedule: `cosine`, `onecycle`, `plateau` (on val_loss) or `constant`.
        warmup_fraction: Share of all optimizer steps in which the learning rate rises to its peak.
        label_smoothing: Share of each target that is spread over all classes, in training.
        class_weights: In the training loss: `none`, `auto` (all classes count alike) or a list of K numbers; with
            several labels, weights of the samples that have the label.
        task: `multiclass` or `multilabel`. Taken from the data; leave it out.
        classes: Class names, in the order of the logits. Taken from the data; leave it out.
        input_spec: Shape, dtype and statistics of the inputs. Taken from the data; leave it out.
        balance: The K weights of `auto`. Taken from the data; leave it out.
        fingerprint: Hashes of the data set and of its split. Taken from the data; leave it out.
    """

    def __init__(
        self,
        backbone: str = "small",
        pretrained: bool | str = False,
        compile: bool = False,
        width: int = 32,
        dropout: float = 0.1,
        optimizer: str = "adamw",
        lr: float = 3e-3,
        momentum: float = 0.9,
        backbone_lr_factor: float = 1.0,
        layer_decay: float = 1.0,
        unfreeze_every: int = 0,
        weight_decay: float = 0.01,
        schedule: str = "cosine",
        warmup_fraction: float = 0.1,
        label_smoothing: float = 0.0,
        class_weights: str | list[float] = "none",
        task: str | None = None,
        classes: list[str] | None = None,
        input_spec: dict[str, Any] | None = None,
        balance: list[float] | None = None,
        fingerprint: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.per_class: dict[str, dict[str, float]] = {}  # metric -> class -> its newest value
        if classes:
            self.build(pretrained=False)  # the checkpoint that these come from has the weights

    def build(self, pretrained: bool | str) -> None:
        """Make the network and the metrics for the classes and the inputs that the hyperparameters name."""
        refuse_outside("model", self.hparams, RANGES)
        network = make_network(self.hparams, pretrained)
        self.network = network.to(memory_format=torch.channels_last)  # fastest to convolve
        if self.hparams["compile"]:
            self.network.compile()  # in place, so that the names of the weights stay
        self.loss_weight: Tensor | None
        weights = choose_weights(self.hparams["class_weights"], self.hparams["balance"], len(self.hparams["classes"]))
        self.register_buffer("loss_weight", weights, persistent=False)
        self.train_metrics, self.val_metrics = self.make_metrics("train"), self.make_metrics("val")
        self.test_metrics = self.make_metrics("test")

    def adopt(self, datamodule: LightningDataModule) -> None:
        """Build for this data, or, where the network came from a checkpoint, refuse data of another kind.

        Raises:
            UserError: The classes or the input shape differ from those that the network was trained on.
        """
        if not self.hparams["classes"]:
            for key in ("task", "classes", "input_spec", "balance", "fingerprint"):
                self.hparams[key] = getattr(datamodule, key)
            self.build(self.hparams["pretrained"])
        shape = self.hparams["input_spec"]["shape"]
        own = f"{self.hparams['task']} classes {self.hparams['classes']} and inputs {shape}"
        other = f"{datamodule.task} classes {datamodule.classes} and inputs {datamodule.input_spec['shape']}"
        if own != other:
            raise UserError(
                f"The checkpoint was trained on {own}, the data has {other}. Set --data.source and --data.image_size "
                "to match, or train anew."
            )

    def setup(self, stage: str) -> None:
        if stage != "predict":  # files to predict are read to the checkpoint's shape, and have no classes
            self.adopt(self.trainer.datamodule)
        if stage == "fit":
            self.refuse_other_data(self.trainer.datamodule)

    def refuse_other_data(self, datamodule: LightningDataModule) -> None:
        """Raise UserError if a file or the split has changed since: going on, and metrics on record, are for the data
        that the checkpoint was trained on."""
        if self.hparams["fingerprint"] != datamodule.fingerprint:
            raise UserError(
                f"This checkpoint was trained on data {self.hparams['fingerprint']}, the data now is "
                f"{datamodule.fingerprint}. Bring back the same files and split, or train anew."
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, ...) raw inputs as the data module yields them -> (B, K) float32 logits."""
        logits: Tensor = self.network(inputs)
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Scalar mean over the batch, in nats: cross-entropy, or for multi-label binary cross-entropy over all labels.

        Args:
            logits: (B, K).
            targets: (B,) int64 class indices, or (B, K) float32 shares of the classes, or which labels hold.
        """
        weight = self.loss_weight if self.training else None  # so that val_loss can be compared between runs
        smoothing = self.hparams["label_smoothing"] if self.training else 0.0
        if self.hparams["task"] == "multilabel":
            targets = targets * (1 - smoothing) + smoothing / 2
            return F.binary_cross_entropy_with_logits(logits.float(), targets, pos_weight=weight)
        losses = F.cross_entropy(logits.float(), targets, weight, reduction="none", label_smoothing=smoothing)
        return losses.mean()

    def make_metrics(self, split: str) -> MetricCollection:
        """Metrics of `train`, `val` or `test`: see metrics.py."""
        return make_metrics(self.hparams["task"], len(self.hparams["classes"]), split)

    def measure(self, metrics: MetricCollection, logits: Tensor, targets: Tensor) -> Tensor:
        """Add a batch to the metrics; returns its loss, with gradients."""
        loss = self.loss(logits, targets)
        update(metrics, self.hparams["task"], loss.detach(), logits.detach(), targets)
        return loss

    def free_stages(self) -> None:
        """Let those stages learn that are to in this epoch."""
        if every := self.hparams["unfreeze_every"]:
            freeze(self.network, len(stages(self.network)) - self.current_epoch // every)

    def on_train_start(self) -> None:
        ddp = getattr(self.trainer.strategy, "_ddp_kwargs", None)  # options of DistributedDataParallel
        waits = ddp is not None and not ddp.get("find_unused_parameters")
        if self.hparams["unfreeze_every"] and waits:  # for gradients of frozen stages, which never come
            raise UserError("model.unfreeze_every needs --trainer.strategy ddp_find_unused_parameters_true.")
        self.free_stages()

    def on_train_epoch_start(self) -> None:  # not called where a run goes on within an epoch
        self.free_stages()
        self.train_metrics.reset()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.measure(self.train_metrics, self(batch[0]), batch[1])
        if not torch.isfinite(loss):
            place = f"epoch {self.current_epoch + 1}, batch {batch_idx}, step {self.global_step}"
            names = ", ".join(self.trainer.datamodule.training_names(batch_idx)[:5])
            raise UserError(f"The loss is {loss.item()} in {place}. Lower model.lr, or look at the samples {names} ...")
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.measure(self.val_metrics, self(batch[0]), batch[1])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.measure(self.test_metrics, self(batch[0]), batch[1])

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """(B, K) float32 probabilities: of the classes, or of each label by itself."""
        logits = self(batch[0]).float()
        return logits.sigmoid() if self.hparams["task"] == "multilabel" else logits.softmax(dim=1)

    def log_epoch(self, metrics: MetricCollection) -> None:
        """Log what the epoch gave, over all devices, and start afresh."""
        values = metrics.compute()
        metrics.reset()
        for name, value in values.items():
            if value.ndim == 1:
                self.per_class[name] = dict(zip(self.hparams["classes"], value.tolist(), strict=True))
        self.log_dict(scalars(values), prog_bar=True)
        if self.trainer.state.fn == "fit" and not math.isfinite(values.get("val_loss", 0.0)):
            place = f"epoch {self.current_epoch + 1}, step {self.global_step}"
            raise UserError(f"val_loss is {values['val_loss'].item()} in {place}. Lower model.lr.")

    def on_train_epoch_end(self) -> None:
        self.log_epoch(self.train_metrics)

    def on_validation_epoch_end(self) -> None:
        self.log_epoch(self.val_metrics)

    def on_test_epoch_end(self) -> None:
        self.log_epoch(self.test_metrics)

    def configure_optimizers(self) -> Any:
        # Lightning 2.6 can't clip gradients of a fused optimizer under 16-mixed (pytorch-lightning#21435).
        fused = self.trainer.precision not in ("16-mixed", "bf16-mixed") or not self.trainer.gradient_clip_val
        steps = self.trainer.estimated_stepping_batches  # which counts the batches as well
        return optim.configure(self.network, self.hparams, steps, fused, self.trainer.num_training_batches)
