"""In which order samples are trained on, and what is drawn for them: functions of seed, epoch and position alone."""

import hashlib
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from . import UserError


class BalancedSampler(DistributedSampler[int]):
    """Draws each sample with a probability, with replacement; as many as there are, shared out over the devices.

    Args:
        weights: (M,) float64, proportional to the probability of each sample.
    """

    def __init__(self, weights: Tensor, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = weights

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.total_size, replacement=True, generator=generator)
        return iter(drawn[self.rank : self.total_size : self.num_replicas].tolist())


def sample_weights(split: Any, class_counts: dict[str, int]) -> Tensor:
    """(M,) float64, inverse to the number of samples of each one's class. Of several labels the rarest counts; a sample
    without any is taken for one of the most frequent class."""
    counts = torch.tensor(list(class_counts.values()), dtype=torch.float64)
    labels = split.labels[split.rows]
    return 1 / counts[labels] if labels.ndim == 1 else (labels / counts).amax(dim=1).clamp(min=1 / counts.max())


def done_batches(trainer: Trainer) -> int:
    """Batches of this epoch that training has finished; while a batch is on its way to the network, its index."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def seed_batch(trainer: Trainer, seed: int) -> None:
    """Augmentation and dropout draw from (seed, epoch, batch, rank), so that a resumed run draws what it would have."""
    key = f"{seed}/{trainer.current_epoch}/{done_batches(trainer)}/{trainer.global_rank}"
    value = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)  # torch.manual_seed takes ten times as long without CUDA
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


class Remaining(Sampler[int]):
    """What an order leaves to be done of its epoch. Its length is that of the whole epoch, which Lightning counts by.

    Args:
        order: Indices as a function of the epoch.
        trainer: Knows, when the epoch's first batch is asked for, how many are done; outside of training none is.
        batch_size: Samples in each of these.
    """

    def __init__(self, order: DistributedSampler[int], trainer: Trainer | None, batch_size: int) -> None:
        self.order, self.trainer, self.batch_size = order, trainer, batch_size

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        done = done_batches(self.trainer) if self.trainer and self.trainer.training else 0
        return islice(iter(self.order), done * self.batch_size, None)

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)


def training_order(
    split: Any, options: Mapping[str, Any], class_counts: dict[str, int], trainer: Trainer | None
) -> Remaining:
    """The order of training samples, a function of seed and epoch: each once, or balanced, as often as others.

    Args:
        split: The training split.
        options: Those of the data module: `batch_size`, `balanced`, `seed`.
        class_counts: Samples of each class.
        trainer: Knows how many devices share the split, and how much of an epoch is done; None where there is one.

    Raises:
        UserError: Not even one batch could be filled.
    """
    world_size, rank = (trainer.world_size, trainer.global_rank) if trainer else (1, 0)
    if len(split) // world_size < options["batch_size"]:
        raise UserError(
            f"{len(split)} training images for {world_size} device(s) are fewer than a batch of "
            f"{options['batch_size']} for each. Add images, or set --data.batch_size lower."
        )
    shares: dict[str, Any] = {"num_replicas": world_size, "rank": rank, "seed": options["seed"], "drop_last": True}
    order = DistributedSampler[int](split, **shares)
    if options["balanced"]:
        order = BalancedSampler(sample_weights(split, class_counts), split, **shares)
    return Remaining(order, trainer, options["batch_size"])
