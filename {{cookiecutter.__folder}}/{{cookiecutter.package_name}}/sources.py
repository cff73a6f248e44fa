"""Where samples come from: the data sets that ship or download, and folders of your own. Add yours here."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torchvision
from filelock import FileLock
from sklearn.datasets import load_digits
from torch import Tensor

from . import UserError
from .images import combine_hashes, file_hashes, list_images, load_images

TORCHVISION_SETS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


@dataclass
class Source:
    """All samples of a data set: images (N, C, H, W) uint8, labels (N,) int64, and the splits that come with it."""

    images: Tensor
    labels: np.ndarray
    classes: list[str]
    data_hash: str
    splits: dict[str, np.ndarray]  # "train" always; "val" and "test" where the data set defines them


def tensor_source(images: Tensor, labels: np.ndarray, classes: list[str], splits: dict[str, np.ndarray]) -> Source:
    """A data set that lies in memory; its hash covers every byte of images, labels and class names."""
    contents = [hashlib.sha256(np.ascontiguousarray(array)).hexdigest() for array in (images.numpy(), labels)]
    parts = [str(tuple(images.shape)), *contents, *classes]
    return Source(images, labels, classes, combine_hashes(parts), splits)


def digits() -> Source:
    """1,797 real handwritten digits of 8x8 pixels, shipped with scikit-learn: works without a network."""
    bunch = load_digits()
    images = torch.from_numpy((bunch.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(1)
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
            f"{name} is not in {data_dir} and could not be downloaded ({str(error).strip() or type(error).__name__}). "
            "Connect to the network once, copy the files there, or use --data.source digits."
        ) from error
    images = torch.cat([torch.as_tensor(part.data) for part in parts])
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    labels = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
    train, test = np.split(np.arange(len(labels)), [len(parts[0])])
    return tensor_source(images, labels, list(parts[0].classes), {"train": train, "test": test})


def image_folder(folder: Path, mode: str, size: int, cache_dir: Path) -> Source:
    """Own images: one sub-folder a class, either directly or below `train/`, `val/` and `test/`.

    Raises:
        UserError: No classes, a class without images, or a class that `train/` lacks.
    """
    names = (
        [name for name in ("train", "val", "test") if (folder / name).is_dir()] if (folder / "train").is_dir() else []
    )
    roots = {name: folder / name for name in names} or {"train": folder}
    classes = sorted(path.name for path in roots["train"].iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise UserError(
            f"{roots['train']} has {len(classes)} sub-folders; expected one for each of at least 2 classes."
        )
    files: list[Path] = []
    labels: list[int] = []
    splits: dict[str, np.ndarray] = {}
    for name, root in roots.items():
        start = len(files)
        unknown = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name not in classes)
        if unknown := [name for name in unknown if not name.startswith(".")]:
            raise UserError(f"{root} has the classes {unknown}, which {roots['train']} lacks. Rename or remove them.")
        for label, class_name in enumerate(classes):
            found = list_images(root / class_name)
            if not found and name == "train":
                raise UserError(f"{root / class_name} holds no image file. Add images or remove the folder.")
            files += found
            labels += [label] * len(found)
        splits[name] = np.arange(start, len(files))
    contents = combine_hashes(file_hashes(files, cache_dir))
    data_hash = combine_hashes([contents, *(str(path.relative_to(folder).as_posix()) for path in files)])
    images = load_images(files, mode, size, contents, cache_dir)
    return Source(images, np.array(labels, dtype=np.int64), classes, data_hash, splits)
