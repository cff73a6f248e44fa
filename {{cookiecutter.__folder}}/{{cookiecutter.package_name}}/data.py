"""The data module: how samples are split, batched and augmented, and the hashes that name them."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, default_convert
from torchvision.transforms.v2 import functional as transforms

from . import ROOT, UserError, refuse_outside
from .augment import augment
from .images import RULE, channel_statistics, combine_hashes, file_hashes, list_images, load_images
from .sources import TORCHVISION_SETS, Source, cut, digits, image_folder, torchvision_set

Batch = tuple[Tensor, Tensor]

RANGES = {"batch_size": (1, 2**20), "image_size": (8, 2**12), "num_workers": (0, 2**10), "max_shift": (0, 2**12)}


class TensorSet(Dataset[Batch]):
    """Some rows of a data set, fetched a whole batch at a time: one indexing operation instead of B Python calls."""

    def __init__(self, images: Tensor, labels: np.ndarray, rows: np.ndarray) -> None:
        self.images, self.labels, self.rows = images, torch.from_numpy(labels), torch.from_numpy(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Images (B, C, H, W) uint8 and labels (B,) int64."""
        rows = self.rows[indices]
        return self.images[rows], self.labels[rows]


class LazyLoader(DataLoader[Batch]):
    """Starts at its first batch. Lightning asks for the iterator before it sets or restores the epoch, and the workers
    of a plain loader would then prefetch the order of epoch 0 (Lightning-AI/pytorch-lightning#21938)."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        yield from super().__iter__()


def choose_num_workers(in_memory: bool) -> int:
    """Worker processes of a loader: none where indexing memory is all they would do, or in a notebook, where they hang
    or lose their output; else up to 8, and never more than the cores that each local process may use."""
    if in_memory or "ipykernel" in sys.modules:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class ImageData(L.LightningDataModule):
    """Yields batches of raw images (B, C, H, W) uint8 and labels (B,) int64. Every argument is an option.

    Args:
        source: `digits`, `mnist`, `fashion_mnist`, `cifar10`, `cifar100`, or the path of a folder with one sub-folder
            for each class (or `train/`, `val/`, `test/` holding these).
        batch_size: Samples in each batch of each device; a multiple of 8 keeps tensor cores busy.
        image_size: Height and width in pixels; by default the source's own, and 64 for a folder.
        color: Whether images of a folder are read with three channels (RGB) rather than one (gray).
        val_fraction: Share of the training images that becomes the validation split, where the source has none.
        test_fraction: The same for the test split.
        split_seed: Seed of these splits. Apart from `seed`, so that runs with several seeds stay comparable.
        max_shift: Augmentation of training images: random translation by up to this many pixels.
        num_workers: Processes of each loader; by default chosen from the machine and the source.
        seed: Seed of the order of training samples. Set it with --seed_everything.
        data_dir: Where data sets are downloaded to; relative to the project.
        cache_dir: Where decoded images and file hashes are kept; relative to the project.
        predict_dir: Folder of images for `predict`.
    """

    def __init__(
        self,
        source: str = "digits",
        batch_size: int = 64,
        image_size: int | None = None,
        color: bool = True,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        split_seed: int = 42,
        max_shift: int = 1,
        num_workers: int | None = None,
        seed: int = 42,
        data_dir: str = "data",
        cache_dir: str = ".cache",
        predict_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.task = "multiclass"
        self.splits: dict[str, TensorSet] = {}
        self.predict_files: list[Path] = []

    def load_source(self) -> Source:
        """The whole data set that `source` names.

        Raises:
            UserError: There is no such folder or data set.
        """
        name, size, cache_dir = self.hparams["source"], self.hparams["image_size"], ROOT / self.hparams["cache_dir"]
        if name == "digits":
            source = digits()
        elif name in TORCHVISION_SETS:
            source = torchvision_set(name, ROOT / self.hparams["data_dir"])
        elif Path(name).expanduser().is_dir():
            mode = "RGB" if self.hparams["color"] else "L"
            return image_folder(Path(name).expanduser(), mode, size or 64, cache_dir)
        else:
            known = ", ".join(["digits", *TORCHVISION_SETS])
            raise UserError(f"data.source is {name!r}; expected a folder that exists, or one of: {known}.")
        if size and size != source.images.shape[-1]:
            source.images = transforms.resize(source.images, [size, size], antialias=True)
        return source

    def setup(self, stage: str) -> None:
        """Load and split, once; for `predict`, read the folder as the checkpoint's network expects it."""
        if stage == "predict":
            self.setup_predict()
        elif not self.splits:
            refuse_outside("data", self.hparams, RANGES)
            source = self.load_source()
            for name in ("test", "val"):
                if name not in source.splits:
                    cut(source, name, self.hparams[f"{name}_fraction"], self.hparams["split_seed"])
            self.adopt(source)

    def adopt(self, source: Source) -> None:
        """Note what the network, the checkpoint and the contract have to know of the data."""
        names = ("train", "val", "test")
        self.classes = source.classes
        self.splits = {name: TensorSet(source.images, source.labels, source.splits[name]) for name in names}
        rows = [f"{name} {source.splits[name].tolist()}" for name in names]
        self.fingerprint = {"data_hash": source.data_hash, "split_hash": combine_hashes([source.data_hash, *rows])}
        channels, size = source.images.shape[1], source.images.shape[-1]
        mean, std = channel_statistics(source.images, self.splits["train"].rows)
        self.input_spec: dict[str, Any] = {
            "name": "images",
            "shape": list(source.images.shape[1:]),
            "dtype": "uint8",
            "mean": mean,
            "std": std,
            "preprocessing": RULE.format(mode="RGB" if channels == 3 else "L", size=size),
        }

    def setup_predict(self) -> None:
        """Read `predict_dir` into the split `predict`, whose labels are positions in `predict_files`."""
        folder, cache_dir = Path(self.hparams["predict_dir"] or "").expanduser(), ROOT / self.hparams["cache_dir"]
        self.predict_files = list_images(folder) if self.hparams["predict_dir"] and folder.is_dir() else []
        if not self.predict_files:
            raise UserError(f"predict needs a folder with images, found none in {self.hparams['predict_dir']!r}.")
        channels, size, _ = self.trainer.lightning_module.hparams["input_spec"]["shape"]
        contents = combine_hashes(file_hashes(self.predict_files, cache_dir))
        images = load_images(self.predict_files, "RGB" if channels == 3 else "L", size, contents, cache_dir)
        rows = np.arange(len(self.predict_files))
        self.splits["predict"] = TensorSet(images, rows, rows)

    def loader(self, name: str) -> LazyLoader:
        """Batches of one split; of this process's share of it where several devices work together."""
        split, batch_size, seed = self.splits[name], self.hparams["batch_size"], self.hparams["seed"]
        world_size, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        training = name == "train"
        if training and len(split) // world_size < batch_size:
            raise UserError(
                f"{len(split)} training images for {world_size} device(s) are fewer than a batch of {batch_size} for "
                "each. Add images, or set --data.batch_size lower."
            )
        sampler: Sampler[int] | range = (
            DistributedSampler(split, world_size, rank, shuffle=True, seed=seed, drop_last=True)
            if training  # the order is a function of seed and epoch, on one device too
            else range(rank, len(split), world_size)  # every sample once: without padding, metrics are exact
        )
        num_workers = self.hparams["num_workers"]
        if num_workers is None:
            num_workers = choose_num_workers(in_memory=self.hparams["source"] in ("digits", *TORCHVISION_SETS))
        return LazyLoader(
            split,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=default_convert,  # batches are fetched whole
            drop_last=training,  # a last batch of a few samples would disturb the statistics of batch norm
            pin_memory=bool(self.trainer) and isinstance(self.trainer.accelerator, CUDAAccelerator),
            generator=torch.Generator().manual_seed(seed),  # seeds the workers
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

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        images, labels = batch
        if self.trainer and self.trainer.training:
            images = augment(images, self.hparams["max_shift"])
        return images, labels
