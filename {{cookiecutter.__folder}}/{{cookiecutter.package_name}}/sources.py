"""Where samples come from: data sets that ship or download, and folders of your own. Add yours here."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torchvision
from filelock import FileLock
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from . import UserError
from .images import combine_hashes, file_hashes, list_images, load_images

TORCHVISION_SETS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


@dataclass
class Source:
    """All samples of a data set: images (N, C, H, W) uint8, labels (N,) int64, names of the classes, a hash of all of
    that, and the rows of each split that the data set itself defines: `train` always, `val` and `test` perhaps."""

    images: Tensor
    labels: np.ndarray
    classes: list[str]
    data_hash: str
    splits: dict[str, np.ndarray]


def tensor_source(images: Tensor, labels: np.ndarray, classes: list[str], splits: dict[str, np.ndarray]) -> Source:
    """A data set that lies in memory; its hash covers every byte of images, labels and class names."""
    contents = [hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for array in (images.numpy(), labels)]
    return Source(images, labels, classes, combine_hashes([str(tuple(images.shape)), *contents, *classes]), splits)


def digits() -> Source:
    """1,797 real handwritten digits of 8x8 pixels, shipped with scikit-learn: works without a network."""
    bunch = load_digits()
    images = torch.from_numpy((bunch.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(1)  # 0 to 16 in the file
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
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    labels = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
    train, test = np.split(np.arange(len(labels)), [len(parts[0])])
    return tensor_source(images, labels, list(parts[0].classes), {"train": train, "test": test})


def class_folders(root: Path) -> list[str]:
    """Names of the sub-folders, in order."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def image_folder(folder: Path, mode: str, size: int, cache_dir: Path) -> Source:
    """Own images: one sub-folder for each class, either directly or below `train/`, `val/` and `test/`.

    Raises:
        UserError: Fewer than two classes, a class without training images, or one that only `val/` or `test/` has.
    """
    names = [name for name in ("train", "val", "test") if (folder / name).is_dir()]
    other = [name for name in class_folders(folder) if name not in names]
    if names and (other or "train" not in names):
        raise UserError(
            f"{folder} has {names} and beside them {other}: expected one sub-folder for each class, or train/ and, if "
            "you like, val/ and test/, each with the classes inside."
        )
    roots = {name: folder / name for name in names} or {"train": folder}
    classes = class_folders(roots["train"])
    if len(classes) < 2:
        folders = f"{roots['train']} has {len(classes)} sub-folders"
        raise UserError(f"{folders}, expected one for each of at least 2 classes.")
    files: list[Path] = []
    labels: list[int] = []
    splits: dict[str, np.ndarray] = {}
    for name, root in roots.items():
        if unknown := [item for item in class_folders(root) if item not in classes]:
            raise UserError(f"{root} has the classes {unknown}, which {roots['train']} lacks. Rename or remove them.")
        start = len(files)
        for label, class_name in enumerate(classes):
            found = list_images(root / class_name)
            if name == "train" and not found:
                raise UserError(f"{root / class_name} holds no image. Add some, or remove the folder.")
            files += found
            labels += [label] * len(found)
        if start == len(files):
            raise UserError(f"{root} holds no image. Add some, or remove the folder to have the split cut from train.")
        splits[name] = np.arange(start, len(files))
    contents = combine_hashes(file_hashes(files, cache_dir))
    data_hash = combine_hashes([contents, *(path.relative_to(folder).as_posix() for path in files)])
    images = load_images(files, mode, size, contents, cache_dir)
    return Source(images, np.array(labels, dtype=np.int64), classes, data_hash, splits)


def cut(source: Source, name: str, fraction: float, seed: int) -> None:
    """Move a stratified share of the training split into the split `name`.

    Raises:
        UserError: A class has too few images to be in both.
    """
    train = source.splits["train"]
    labels = source.labels[train]
    try:
        keep, taken = train_test_split(train, test_size=fraction, stratify=labels, random_state=seed)
    except ValueError as error:
        counts = dict(zip(source.classes, np.bincount(labels).tolist(), strict=False))
        raise UserError(
            f"No {name} split of {fraction:.0%} can be cut from {counts} training images: {error} Add images, take the "
            f"rarest class out, or change --data.{name}_fraction."
        ) from error
    source.splits |= {"train": np.sort(keep), name: np.sort(taken)}
