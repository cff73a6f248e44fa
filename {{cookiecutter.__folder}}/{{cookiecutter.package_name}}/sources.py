"""Where samples come from: data sets that ship or download, folders and CSV files of your own. Add yours here."""

import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from filelock import FileLock
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from . import ROOT, UserError
from .images import combine_hashes
from .listing import SPLITS, find_groups, list_csv, list_folder
from .scan import scan

TORCHVISION_SETS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


@dataclass
class Source:
    """All samples of a data set.

    Args:
        images: Indexed like a tensor of (N, H, W, C) uint8.
        labels: (N,) int64 class indices; where a sample can have several labels, (N, K) uint8 of 0 and 1; or (N,)
            float32 numbers, for a task of your own that predicts these.
        classes: Names of the K classes.
        size: Height and width in pixels that the network gets, of images that may be stored larger.
        data_hash: Covers contents, labels and names.
        splits: Samples of each split that the data set itself defines: `train` always, `val` and `test` perhaps.
        names: What a sample is called in reports.
        pixel_keys: Equal for samples with equal pixels.
        dhashes: (N,) uint64, in few bits different for pictures that look alike; none where that is not looked for.
        groups: The group of each sample, where groups must not be parted.
        left_out: Files that are not among the samples, and why.
        report: Lines that `check` prints.
        faults: What must be put right before training.
    """

    images: Any
    labels: np.ndarray
    classes: list[str]
    size: int
    data_hash: str
    splits: dict[str, np.ndarray]
    names: list[str]
    pixel_keys: list[str]
    dhashes: np.ndarray | None = None
    groups: list[str] | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def counts(self, rows: np.ndarray) -> dict[str, int]:
        """How many of some samples have each label, by class name; none where labels are numbers."""
        labels = self.labels[rows]
        if labels.dtype.kind == "f":
            return {}
        counts = labels.sum(axis=0) if labels.ndim == 2 else np.bincount(labels, minlength=len(self.classes))
        return dict(zip(self.classes, counts.tolist(), strict=False))

    def balance(self, rows: np.ndarray) -> list[float]:
        """Weights that make all classes count alike: for multi-label, samples without a label over those with it."""
        counts = np.array(list(self.counts(rows).values()), dtype=np.float64).clip(min=1)  # empty for numbers
        several = self.labels.ndim == 2
        weights = (len(rows) - counts).clip(min=1) / counts if several else len(rows) / (len(counts) * counts)
        return [float(weight) for weight in weights]

    def split_table(self) -> bytes:
        """A CSV that says of each sample which split it is in, with which labels."""
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["sample", "split", "labels"])
        for name, rows in self.splits.items():
            for row in rows.tolist():
                label = self.labels[row]
                marks = np.flatnonzero(label) if self.labels.ndim == 2 else [label]
                words = [str(label)] if self.labels.dtype.kind == "f" else [self.classes[mark] for mark in marks]
                writer.writerow([self.names[row], name, ";".join(words)])
        return table.getvalue().encode()


def tensor_source(images: Tensor, labels: np.ndarray, classes: list[str], splits: dict[str, np.ndarray]) -> Source:
    """A data set that lies in memory, (N, H, W, C) uint8; its hash covers every byte."""
    contents = [hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for array in (images.numpy(), labels)]
    data_hash = combine_hashes([str(tuple(images.shape)), *contents, *classes])
    keys = [hashlib.sha256(image.data).hexdigest() for image in np.ascontiguousarray(images.numpy())]
    names = [f"sample {row}" for row in range(len(keys))]
    return Source(images, labels, classes, images.shape[1], data_hash, splits, names, keys)


def digits() -> Source:
    """1,797 real handwritten digits of 8x8 pixels, shipped with scikit-learn: works without a network."""
    bunch = load_digits()
    images = torch.from_numpy((bunch.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(3)  # 0 to 16 in the file
    labels = bunch.target.astype(np.int64)
    return tensor_source(images, labels, [str(name) for name in bunch.target_names], {"train": np.arange(len(labels))})


def torchvision_set(name: str, data_dir: Path) -> Source:
    """A data set of torchvision's, downloaded once.

    Raises:
        UserError: It is not there yet and can't be downloaded.
    """
    dataset = getattr(torchvision.datasets, TORCHVISION_SETS[name])
    data_dir.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(data_dir / f"{name}.lock"):  # one process downloads, the others wait
            parts = [dataset(data_dir, train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{name} is not in {data_dir} and can't be downloaded ({' '.join(str(error).split())[:200]}). Connect "
            "to the network once, copy the data set there, or use --data.source digits."
        ) from error
    images = torch.cat([torch.as_tensor(part.data) for part in parts])
    images = images.unsqueeze(3) if images.ndim == 3 else images
    labels = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
    train, test = np.split(np.arange(len(labels)), [len(parts[0])])
    return tensor_source(images, labels, list(parts[0].classes), {"train": train, "test": test})


def file_source(
    path: Path, mode: str, size: int, stored: int, group: str | None, cache_dir: Path, cache_gb: float
) -> Source:
    """Own images, listed by a folder or a CSV; whatever is wrong with them is collected, so that all of it can be said
    at once.

    Raises:
        UserError: There is nothing to train on, or the files can't even be listed.
    """
    listing = list_csv(path) if path.is_file() else list_folder(path)
    if group:
        listing.groups = find_groups(listing, group)
    if not listing.files or not {"", "train"} & set(listing.splits):
        raise UserError(
            f"{path} holds no training image: expected one sub-folder for each class, or a CSV that names files."
        )
    found = scan(listing.files, mode, stored, cache_dir, cache_gb)
    all_names = [file.relative_to(listing.root).as_posix() for file in listing.files]
    left_out = {all_names[row]: reason for row, reason in found.faults.items()}
    kept, splits = found.kept.tolist(), np.array(listing.splits)[found.kept]
    names, marks = [all_names[row] for row in kept], [listing.labels[row] for row in kept]
    report = [f"{len(all_names):,} files, {len(names):,} usable"]
    report += [f"{count:,} {note}" for note, count in found.notes.most_common()]
    faults = []
    for name in dict.fromkeys(listing.splits):
        seen = {
            mark for marks, split in zip(listing.labels, listing.splits, strict=True) if split == name for mark in marks
        }
        if unknown := sorted(seen - set(listing.classes)):
            faults.append(
                f"{name} has the classes {unknown}, which train lacks. Rename or remove them, or add to train."
            )
    if len(listing.classes) < 2:
        faults.append(f"{path} has {len(listing.classes)} classes in train, expected at least 2.")
    if listing.ignored:
        report.append(f"{len(listing.ignored):,} other files ignored, the first is {listing.ignored[0].name}")
    labels = np.array([[name in mark for name in listing.classes] for mark in marks], dtype=np.uint8)
    if not listing.multilabel:
        labels = labels.argmax(axis=1)
    rows = [f"{name}\0{mark}" for name, mark in zip(names, marks, strict=True)]
    return Source(
        found.images,
        labels,
        listing.classes,
        size,
        data_hash=combine_hashes([*found.hashes, *rows, *listing.classes]),
        splits={name: np.flatnonzero(splits == name) for name in SPLITS if name in listing.splits}
        or {"train": np.arange(len(kept))},
        names=names,
        pixel_keys=found.pixel_keys,
        dhashes=found.dhashes,
        groups=[listing.groups[row] for row in kept] if listing.groups else None,
        left_out=left_out,
        report=report,
        faults=faults,
    )


def load(options: Mapping[str, Any], cropped: bool) -> Source:
    """The whole data set that the data module's options name.

    Args:
        options: Those of the data module.
        cropped: Whether training crops at random; files are then stored larger, so that crops stay sharp.

    Raises:
        UserError: There is no such folder, file or data set.
    """
    name, size = options["source"], options["image_size"]
    if (path := Path(name).expanduser()).exists() and name not in ("digits", *TORCHVISION_SETS):
        size = size or 64
        mode, stored = "RGB" if options["color"] else "L", round(size * 8 / 7) if cropped else size
        return file_source(path, mode, size, stored, options["group"], ROOT / options["cache_dir"], options["cache_gb"])
    if name == "digits":
        source = digits()
    elif name in TORCHVISION_SETS:
        source = torchvision_set(name, ROOT / options["data_dir"])
    else:
        known = ", ".join(["digits", *TORCHVISION_SETS])
        raise UserError(f"data.source is {name!r}; expected a folder or a CSV that exists, or one of: {known}.")
    if size and size != source.size:
        images = transforms.resize(source.images.permute(0, 3, 1, 2), [size, size], antialias=True)
        source.images, source.size = images.permute(0, 2, 3, 1), size
    return source
