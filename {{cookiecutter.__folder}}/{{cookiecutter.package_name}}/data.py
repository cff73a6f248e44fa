"""The data module: which samples a run gets, and how those that train are augmented."""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from . import ROOT, DataFaults, UserError, refuse_outside
from .augment import augment, choose, mix
from .images import RULE, channel_statistics, list_images
from .listing import SPLITS
from .loader import Batch, ImageSet, Loaders
from .scan import scan
from .sources import Source, load
from .splits import split

RANGES: dict[str, tuple[float, float]] = {"batch_size": (1, 2**20), "image_size": (8, 2**12), "min_area": (0.01, 1)}
RANGES |= {"num_workers": (0, 2**10), "max_shift": (0, 2**12), "color_jitter": (0, 1), "erasing": (0, 1)}
RANGES |= {"mixup": (0, 1e3), "cutmix": (0, 1e3), "cache_gb": (0, 1e6)}
STATISTICS_OF = 2048  # training images, evenly spaced: more would take seconds


class DataModule(Loaders):
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
        predict_source: Folder of images for `predict`.
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
        predict_source: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

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
        """Take the samples of a source, and describe its inputs."""
        super().adopt(source)
        sizes: dict[str, int | None] = dict.fromkeys(SPLITS, source.size)
        if self.augmentation["min_area"] < 1:
            sizes["train"] = None  # to be cropped at random
        self.splits = {
            name: ImageSet(source.images, source.labels, source.splits[name], sizes[name]) for name in SPLITS
        }
        stored, channels, train = source.images.shape[1], source.images.shape[3], self.splits["train"]
        some = torch.linspace(0, len(train) - 1, min(len(train), STATISTICS_OF)).round().long()
        mean, std = channel_statistics(source.images, train.rows[some])
        self.input_spec = {
            "name": "images",
            "shape": [channels, source.size, source.size],
            "dtype": "uint8",
            "mean": mean,
            "std": std,
            "preprocessing": RULE.format(mode="RGB" if channels == 3 else "L", stored=stored, size=source.size),
            "stored_size": stored,
        }

    def setup_predict(self) -> None:
        """Read `predict_source` into the split `predict`, whose labels are positions in `predict_names`.

        Raises:
            UserError: There is no image, or one can't be used; names all of these.
        """
        folder, cache_dir = Path(self.hparams["predict_source"] or "").expanduser(), ROOT / self.hparams["cache_dir"]
        files = list_images(folder)[0] if self.hparams["predict_source"] else []
        if not files:
            raise UserError(f"predict needs a folder with images, found none in {self.hparams['predict_source']!r}.")
        spec = self.trainer.lightning_module.hparams["input_spec"]
        channels, size, _ = spec["shape"]
        mode, cache_gb = "RGB" if channels == 3 else "L", self.hparams["cache_gb"]
        found = scan(files, mode, spec["stored_size"], cache_dir, cache_gb)
        if faults := [f"{files[row]}: {reason}" for row, reason in found.faults.items()]:
            raise DataFaults(faults)
        self.predict_names, rows = [file.as_posix() for file in files], np.arange(len(files))
        self.splits["predict"] = ImageSet(found.images, rows, rows, size)

    def augment(self, batch: Batch) -> Batch:
        """A training batch as the network sees it."""
        images, targets = batch
        images = augment(images, self.input_spec["shape"][-1], self.augmentation)
        if self.augmentation["mixup"] or self.augmentation["cutmix"]:
            shares = targets if targets.ndim == 2 else F.one_hot(targets, len(self.classes)).float()
            return mix(images, shares, self.augmentation)
        return images, targets
