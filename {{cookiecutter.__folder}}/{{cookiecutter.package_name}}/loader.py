"""How batches are fetched: whole, by a fitting number of workers, and the same for a resumed run."""

import os
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_convert

from . import usable_cores
from .images import Stored, central, combine_hashes
from .listing import SPLITS
from .order import seed_batch, training_order
from .sources import Source

Batch = tuple[Tensor, Tensor]


class ImageSet(Dataset[Batch]):
    """Some samples of a data set, fetched a whole batch at a time: one indexing operation instead of B Python calls.

    Args:
        images: All images, indexed like a tensor of (N, H, W, C) uint8.
        labels: All labels, (N,) int64 or (N, K) uint8.
        rows: (M,) int64, which samples these are.
        size: Images are cut to their central size x size pixels; None leaves them whole, to be cropped at random.
    """

    def __init__(self, images: Any, labels: np.ndarray, rows: np.ndarray, size: int | None) -> None:
        self.images, self.size = images, size or images.shape[1]
        self.labels, self.rows = torch.from_numpy(labels), torch.from_numpy(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Images (B, C, size, size) uint8, and labels: (B,) int64, or for multi-label (B, K) float32."""
        rows = self.rows[indices]
        labels = self.labels[rows]
        in_memory = isinstance(self.images, Tensor)
        images = self.images.index_select(0, rows) if in_memory else self.images[rows]  # ten times as fast as indexing
        return central(images.permute(0, 3, 1, 2), self.size), labels.float() if labels.ndim == 2 else labels


class LazyLoader(DataLoader[Batch]):
    """Starts at its first batch. Lightning asks for the iterator before it sets or restores the epoch, and the workers
    of a plain loader would then prefetch the order of epoch 0 (Lightning-AI/pytorch-lightning#21938)."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        yield from super().__iter__()


def ignore_interrupt(_: int) -> None:
    """For workers: Ctrl+C reaches the whole group of processes, but only the one that trains decides what follows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def choose_num_workers(images: Any, cuda: bool) -> int:
    """Worker processes of a loader: none in a notebook, where they hang or lose their output, nor where they would do
    nothing but copy memory for a device that is this very processor; else up to 8, and never more than the cores that
    each local process may use."""
    cheap = isinstance(images, Tensor) or (isinstance(images, Stored) and not cuda)
    if cheap or "ipykernel" in sys.modules:
        return 0
    return min(8, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class Loaders(L.LightningDataModule):
    """Loaders of the splits that a data module sets up, whatever its inputs are.

    Such a module has the options `batch_size`, `num_workers`, `seed`, `balanced`, `on_bad_file` and `predict_source`.
    Its `setup` fills `splits`, each like an `ImageSet`, and `input_spec` (`name`, `shape` and `dtype` of one input, and
    what its network asks for), and calls `adopt`; for `predict`, it fills `splits["predict"]` and `predict_names`.
    """

    input_spec: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.splits: dict[str, Any] = {}
        self.documents: dict[str, bytes] = {}  # files that are kept with the run, by name
        self.report: list[str] = []
        self.faults: list[str] = []
        self.predict_names: list[str] = []

    def adopt(self, source: Source) -> None:
        """Note what the network, the checkpoint and the contract have to know of the data."""
        self.classes, self.class_counts = source.classes, source.counts(source.splits["train"])
        self.balance, self.names = source.balance(source.splits["train"]), source.names
        self.task = "multilabel" if source.labels.ndim == 2 else "multiclass"
        if source.labels.dtype.kind == "f":
            self.task = "regression"
        rows = [f"{name} {source.splits[name].tolist()}" for name in SPLITS]
        self.fingerprint = {"data_hash": source.data_hash, "split_hash": combine_hashes([source.data_hash, *rows])}
        self.documents = {"split.csv": source.split_table()}
        left_out = [f"{name}: {reason}" for name, reason in source.left_out.items()]
        self.faults, self.report = source.faults, source.report
        if self.hparams["on_bad_file"] == "stop":
            self.faults = left_out + source.faults
            hint = f"{len(left_out)} can't be used; --data.on_bad_file skip would leave them out"
            self.report = source.report + [hint] * bool(left_out)
        elif left_out:
            self.report = source.report + [f"left out {line}" for line in left_out]
            self.documents["left_out.txt"] = "\n".join(left_out).encode()
            self.fingerprint["left_out_hash"] = combine_hashes(left_out)

    def loader(self, name: str) -> LazyLoader:
        """Batches of one split; of this process's share of it where several devices work together."""
        split, seed = self.splits[name], self.hparams["seed"]
        world_size, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler: Sampler[int] | range = range(rank, len(split), world_size)  # unpadded: metrics are exact
        if name == "train":
            sampler = training_order(split, self.hparams, self.class_counts, self.trainer)
        cuda = bool(self.trainer) and isinstance(self.trainer.accelerator, CUDAAccelerator)
        num_workers = self.hparams["num_workers"]
        if num_workers is None:
            num_workers = choose_num_workers(split.images, cuda)
        return LazyLoader(
            split,
            batch_size=self.hparams["batch_size"],
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=default_convert,  # batches are fetched whole
            drop_last=name == "train",  # a last batch of a few samples would disturb the statistics of batch norm
            pin_memory=cuda,
            generator=torch.Generator().manual_seed(seed),  # seeds the workers
            worker_init_fn=ignore_interrupt,
            persistent_workers=num_workers > 0,
            prefetch_factor=4 if num_workers > 0 else None,
        )

    def train_dataloader(self) -> LazyLoader:
        return self.loader("train")

    def val_dataloader(self) -> LazyLoader:
        return self.loader("val")

    def test_dataloader(self) -> LazyLoader:
        return self.loader("test")

    def predict_dataloader(self) -> LazyLoader:
        return self.loader("predict")

    def training_names(self, batch_idx: int) -> list[str]:
        """Names of the samples in a batch of this epoch, on this device."""
        split, size = self.splits["train"], self.hparams["batch_size"]
        order = training_order(split, self.hparams, self.class_counts, self.trainer).order
        order.set_epoch(self.trainer.current_epoch)
        return [self.names[split.rows[index]] for index in islice(order, batch_idx * size, (batch_idx + 1) * size)]

    def augment(self, batch: Batch) -> Batch:
        """A training batch as the network sees it."""
        return batch

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer and self.trainer.training:
            seed_batch(self.trainer, self.hparams["seed"])
            batch = self.augment(batch)
        return batch
