"""How fast batches of JPEG files arrive: a generated project's data module against a plain ImageFolder.

    python benchmarks/loader.py

Both draw a random resized crop to 224 pixels and a flip for each sample of a folder of JPEGs of 250 to 500 pixels, on
one core, by turns in one process. The clock counts processor seconds, so that other work disturbs it little. The first
epoch includes listing, checking, decoding and storing all files. Ratios above 1 are in favour of the project.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from project import describe_machine, generate
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

BATCH, SIZE, MIN_AREA = 64, 224, 0.08  # the share is torchvision's default


def write_images(folder: Path, count: int) -> None:
    """Smooth and fine noise mixed, so that files are as large as those of photographs: about 50 kB."""
    random = np.random.default_rng(0)
    for number in range(count):
        height, width = (int(side) for side in random.integers(250, 501, 2))
        image = torch.zeros(1, 3, height, width)
        for cells, strength in ((4, 90), (16, 50), (64, 30), (200, 18)):
            noise = torch.from_numpy(random.standard_normal((1, 3, cells, cells)).astype(np.float32))
            image += strength * torch.nn.functional.interpolate(noise, (height, width), mode="bilinear")
        pixels = (image[0] + 128).clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
        path = folder / f"class {number % 10}" / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=88)


def plain_loader(folder: Path, to_tensor: list[Any]) -> DataLoader:
    """What a PyTorch tutorial writes."""
    transform = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), *to_tensor])
    return DataLoader(datasets.ImageFolder(str(folder), transform), batch_size=BATCH, shuffle=True)


def seconds_per_image(batches: Callable[[], Iterable[Any]]) -> float:
    """Processor seconds that one pass takes for each image, what is done to start it included."""
    start, images = time.process_time(), 0
    for inputs, _ in batches():
        images += len(inputs)
    return (time.process_time() - start) / images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        project = generate(Path(name))  # on its own line: cookiecutter replaces sys.path
        sys.path.insert(0, str(project))
        from my_lightning_project.data import DataModule

        folder, cache = Path(name) / "images", Path(name) / "cache"
        write_images(folder, options.images)
        data: DataModule

        def first_epoch() -> Iterable[Any]:
            nonlocal data
            shutil.rmtree(cache, ignore_errors=True)
            data = DataModule(
                source=str(folder),
                image_size=SIZE,
                min_area=MIN_AREA,
                flip=True,
                batch_size=BATCH,
                cache_dir=str(cache),
                val_fraction=0.02,
                test_fraction=0.02,
                num_workers=0,
            )
            data.setup("fit")
            return later_epoch()

        def later_epoch() -> Iterable[Any]:
            return map(data.augment, data.train_dataloader())

        to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        ends: dict[str, list[Any]] = {"float32": to_float, "uint8": [v2.PILToTensor()]}
        ratios: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):
            anchors = {kind: seconds_per_image(partial(plain_loader, folder, end)) for kind, end in ends.items()}
            ours = {"first": seconds_per_image(first_epoch), "later": seconds_per_image(later_epoch)}
            if number:  # the first round warms up
                for epoch, mine in ours.items():
                    for kind, anchor in anchors.items():
                        ratios.setdefault(f"{epoch} epoch, ImageFolder giving {kind}", []).append(anchor / mine)
        print(describe_machine())
        print(f"{options.images} JPEGs, 1 core, {options.rounds} rounds; images/s of the project over ImageFolder's")
        for title, values in ratios.items():
            low, high = min(values), max(values)
            print(f"  {title:40} {statistics.median(values):5.2f}   ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
