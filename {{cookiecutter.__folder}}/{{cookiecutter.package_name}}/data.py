"""The data module: which samples a run gets, how they are batched and augmented, and the hashes that name them."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch.nn import functional as F
from torch.utils.data import Sampler, default_convert

from . import ROOT, DataFaults, UserError, refuse_outside
from .augment import augment, choose, mix
from .images import RULE, channel_statistics, combine_hashes, list_images
from .listing import SPLITS
from .loader import Batch, ImageSet, LazyLoader, choose_num_workers, seed_batch, training_order
from .scan import scan
from .sources import Source, load
from .splits import split

RANGES: dict[str, tuple[float, float]] = {"batch_size": (1, 2**20), "image_size": (8, 2**12), "min_area": (0.01, 1)}
RANGES |= {"num_workers": (0, 2**10), "max_shift": (0, 2**12), "color_jitter": (0, 1), "erasing": (0, 1)}
RANGES |= {"mixup": (0, 1e3), "cutmix": (0, 1e3), "cache_gb": (0, 1e6)}
STATISTICS_OF = 2048  # training images, evenly spaced: more would take seconds


class ImageData(L.LightningDataModule):
    """Yields batches of raw images (B, C, H, W) uint8 and targets: (B,) int64 class indices, or (B, K) float32 where a
    sample can have several labels, or where training mixes samples. Every argument is an option.

    Args:
        source: `digits`, `mnist`, `fashion_mnist`, `cifar10`, `cifar100`; or the path of a folder with one sub-folder
            for each class (or `train/`, `val/`, `test/` holding these); or the path of a CSV of files and labels.
        batch_size: Samples in each batch of each device; a multiple of 8 keeps tensor cores busy.
        image_size: Height and width in pixels; by default the source's own, and 64 for files.
        color: Whether files are read with three channels (RGB) rather than one (gray).
        on_bad_file: `stop` before training if a file can't be used, or `skip` such files and list them with the run.
        group: Regular expression that finds a file's group (a patient, a video) in its path; groups are never parted.
        val_fraction: Share of the training images that becomes the validation split, where the source has none.
        test_fraction: The same for the test split.
        split_seed: Seed of these splits. Apart from `seed`, so that runs with several seeds stay comparable.
        balanced: Whether training draws all classes equally often, with replacement.
        flip: Augmentation: mirror half of the training images. This and what follows is by default what suits the
            source; see augment.py.
        max_shift: Augmentation: random translation by up to this many pixels.
        min_area: Augmentation: a random crop of at least this share of the image, resized; 1 for none.
        color_jitter: Augmentation: largest change of brightness, contrast and saturation, as a share.
        erasing: Augmentation: probability that a random box of an image is erased.
        mixup: Augmentation: parameter of mixup's Beta distribution; 0 for none.
        cutmix: Augmentation: parameter of cutmix's Beta distribution; 0 for none.
        num_workers: Processes of each loader; by default chosen from the machine and the source.
        seed: Seed of the order of training samples. Set it with --seed_everything.
        data_dir: Where data sets are downloaded to; relative to the project.
        cache_dir: Where decoded images are kept; relative to the project.
        cache_gb: If all images would take more GiB, none are kept, and the loader's workers decode at each use.
        predict_dir: Folder of images for `predict`.
    """

    def __init__(
        self,
        source: str = "digits",
        batch_size: int = 64,
        image_size: int | None = None,
        color: bool = True,
        on_bad_file: str = "stop",
        group: str | None = None,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        split_seed: int = 42,
        balanced: bool = False,
        flip: bool | None = None,
        max_shift: int | None = None,
        min_area: float | None = None,
        color_jitter: float | None = None,
        erasing: float | None = None,
        mixup: float | None = None,
        cutmix: float | None = None,
        num_workers: int | None = None,
        seed: int = 42,
        data_dir: str = "data",
        cache_dir: str = ".cache",
        cache_gb: float = 50.0,
        predict_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.splits: dict[str, ImageSet] = {}
        self.documents: dict[str, bytes] = {}  # files that are kept with the run, by name
        self.faults: list[str] = []
        self.predict_files: list[Path] = []

    def setup(self, stage: str) -> None:
        """Load and split, once; for `predict`, read the folder as the checkpoint's network expects it.

        Raises:
            DataFaults: Something about the data must be put right; all of it, after everything else is set up.
        """
        if stage == "predict":
            self.setup_predict()
        elif not self.splits:
            refuse_outside("data", self.hparams, RANGES)
            if self.hparams["on_bad_file"] not in ("stop", "skip"):
                raise UserError(f"data.on_bad_file is {self.hparams['on_bad_file']!r}, expected stop or skip.")
            self.augmentation = choose(self.hparams["source"], self.hparams)
            source = load(self.hparams, cropped=self.augmentation["min_area"] < 1)
            fractions = {"test": self.hparams["test_fraction"], "val": self.hparams["val_fraction"]}
            split(source, fractions, self.hparams["split_seed"])
            self.adopt(source)
        if stage != "predict" and self.faults:
            raise DataFaults(self.faults)

    def adopt(self, source: Source) -> None:
        """Note what the network, the checkpoint and the contract have to know of the data."""
        self.classes, self.class_counts = source.classes, source.counts(source.splits["train"])
        self.balance = source.balance(source.splits["train"])
        self.task = "multilabel" if source.labels.ndim == 2 else "multiclass"
        sizes = {"train": None if self.augmentation["min_area"] < 1 else source.size}  # else cropped at random
        self.splits = {
            name: ImageSet(source.images, source.labels, source.splits[name], sizes.get(name, source.size))
            for name in SPLITS
        }
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
        stored, channels, train = source.images.shape[1], source.images.shape[3], self.splits["train"]
        some = torch.linspace(0, len(train) - 1, min(len(train), STATISTICS_OF)).round().long()
        mean, std = channel_statistics(source.images, train.rows[some])
        self.input_spec: dict[str, Any] = {
            "name": "images",
            "shape": [channels, source.size, source.size],
            "dtype": "uint8",
            "mean": mean,
            "std": std,
            "preprocessing": RULE.format(mode="RGB" if channels == 3 else "L", stored=stored, size=source.size),
            "stored_size": stored,
        }

    def setup_predict(self) -> None:
        """Read `predict_dir` into the split `predict`, whose labels are positions in `predict_files`.

        Raises:
            UserError: There is no image, or one can't be used; names all of these.
        """
        folder, cache_dir = Path(self.hparams["predict_dir"] or "").expanduser(), ROOT / self.hparams["cache_dir"]
        self.predict_files = list_images(folder)[0] if self.hparams["predict_dir"] else []
        if not self.predict_files:
            raise UserError(f"predict needs a folder with images, found none in {self.hparams['predict_dir']!r}.")
        spec = self.trainer.lightning_module.hparams["input_spec"]
        channels, size, _ = spec["shape"]
        mode, cache_gb = "RGB" if channels == 3 else "L", self.hparams["cache_gb"]
        found = scan(self.predict_files, mode, spec["stored_size"], cache_dir, cache_gb)
        if faults := [f"{self.predict_files[row]}: {reason}" for row, reason in found.faults.items()]:
            raise DataFaults(faults)
        rows = np.arange(len(self.predict_files))
        self.splits["predict"] = ImageSet(found.images, rows, rows, size)

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

    def augment(self, batch: Batch) -> Batch:
        """A training batch as the network sees it."""
        images, targets = batch
        images = augment(images, self.input_spec["shape"][-1], self.augmentation)
        if self.augmentation["mixup"] or self.augmentation["cutmix"]:
            shares = targets if targets.ndim == 2 else F.one_hot(targets, len(self.classes)).float()
            return mix(images, shares, self.augmentation)
        return images, targets

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer and self.trainer.training:
            seed_batch(self.trainer, self.hparams["seed"])
            batch = self.augment(batch)
        return batch
