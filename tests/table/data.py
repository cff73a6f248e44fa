"""The data module: rows of a CSV with a header, numbers, and in the last column the class."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import UserError
from .loader import Batch, ImageSet, Loaders
from .sources import tensor_source
from .splits import split


class TableSet(ImageSet):
    def __getitems__(self, indices: list[int]) -> Batch:
        """Features (B, F) float32 and labels (B,) int64."""
        rows = self.rows[indices]
        return self.images[rows], self.labels[rows]


def read(path: str) -> tuple[torch.Tensor, list[str]]:
    """The numbers, (N, F) float32, and the last column."""
    try:
        rows = list(csv.reader(Path(path).read_text("utf-8").splitlines()))[1:]
        return torch.tensor([[float(cell) for cell in row[:-1]] for row in rows]), [row[-1] for row in rows]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read as a table of numbers: {error}") from error


class DataModule(Loaders):
    """Yields features (B, F) float32 and class indices (B,) int64."""

    def __init__(
        self,
        source: str = "table.csv",
        batch_size: int = 64,
        balanced: bool = False,
        on_bad_file: str = "stop",
        num_workers: int | None = None,
        seed: int = 42,
        predict_source: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        if stage == "predict":
            features, _ = read(self.hparams["predict_source"])
            rows = np.arange(len(features))
            self.splits["predict"] = TableSet(features, rows, rows, size=None)
            self.predict_names = [f"row {row + 1}" for row in rows]
        elif not self.splits:
            features, names = read(self.hparams["source"])
            classes = sorted(set(names))
            labels = np.array([classes.index(name) for name in names])
            source = tensor_source(features, labels, classes, {"train": np.arange(len(labels))})
            split(source, {"test": 0.2, "val": 0.2}, seed=42)
            self.splits = {name: TableSet(features, labels, rows, size=None) for name, rows in source.splits.items()}
            train = features[source.splits["train"]]
            self.input_spec: dict[str, Any] = {
                "name": "features",
                "shape": [features.shape[1]],
                "dtype": "float32",
                "mean": train.mean(dim=0).tolist(),
                "std": train.std(dim=0).clamp(min=1e-6).tolist(),
            }
            self.adopt(source)
