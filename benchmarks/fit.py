"""How fast `fit` trains with everything on: against the plain loop of a tutorial, and against itself without tracking.

    python benchmarks/fit.py

The project runs its preset `fashion_mnist`: `Flatten, Linear(784, 256), ReLU, Linear(256, 10)`, AdamW, clipping and a
cosine schedule, 50,000 images to train and 10,000 to validate, in batches of 128, none augmented. The loop does the
same. The data are random images in FashionMNIST's files.
`fit` has metrics, tracking, both checkpoints and early stopping; in the line before the last, a point for every step as
well; in the last, a resume point each second instead of every ten minutes. On one core, by turns in one process; the
clock counts the processor seconds of a whole epoch, validation included, after the first one.
Ratios above 1 are in favour of the project.
The shares say what exact resuming costs: how much of the time of `fit`, waiting for the disk included, its parts take.
"""

import argparse
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from project import describe_machine, generate
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, random_split
from torchvision import datasets, transforms

BATCH, EPOCHS, TRAIN, VAL = 128, 3, 50_000, 10_000


def write_images(root: Path) -> None:
    """Random pixels, in the format of the real files."""
    random, raw = np.random.default_rng(0), root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", TRAIN + VAL), ("t10k", 10_000)):
        pixels, labels = random.integers(0, 256, count * 784, np.uint8), random.integers(0, 10, count, np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels.tobytes())


def plain_loop(root: Path) -> list[float]:
    """Processor seconds of each epoch but the first."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.286,), (0.353,))])
    dataset = datasets.FashionMNIST(str(root), train=True, transform=transform)
    train, val = random_split(dataset, [TRAIN, VAL], torch.Generator().manual_seed(42))
    train_loader, val_loader = DataLoader(train, BATCH, shuffle=True), DataLoader(val, BATCH)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    spent, best = [], float("inf")
    for _ in range(EPOCHS):
        start = time.process_time()
        network.train()
        for images, labels in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(network(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        network.eval()
        total, correct = 0.0, 0
        with torch.no_grad():
            for images, labels in val_loader:
                logits = network(images)
                total += F.cross_entropy(logits, labels, reduction="sum").item()
                correct += (logits.argmax(dim=1) == labels).sum().item()
        if total < best:
            best = total
            torch.save(network.state_dict(), root / "plain.pt")
        spent.append(time.process_time() - start)
    return spent[1:]


def project_fit(root: Path, *options: str) -> list[float]:
    """The same of the project's `fit`, its command line in this process."""
    from my_lightning_project import cli

    starts: list[float] = []

    class Task(cli.ClassificationTask):
        def on_train_epoch_start(self) -> None:
            starts.append(time.process_time())
            super().on_train_epoch_start()

        def on_train_end(self) -> None:
            starts.append(time.process_time())

    original, cli.ClassificationTask = cli.ClassificationTask, Task
    preset = Path(cli.__file__).parents[1] / "presets" / "fashion_mnist.yaml"
    words = f"fit --config {preset} --data.data_dir {root} --trainer.max_epochs {EPOCHS} --trainer.precision 32-true"
    words += " --onnx.enabled false"
    sys.argv = ["project", *words.split(), *options]
    try:
        cli.run()
    finally:
        cli.ClassificationTask = original
    return [end - start for start, end in zip(starts[1:], starts[2:], strict=False)]


# What exact resuming adds to training, in words -> where it is.
ADDED = {
    "draws by position, for each batch": ("loader", "seed_batch"),
    "looking for a signal and the time, for each batch": ("resume.ResumePoint", "on_train_batch_end"),
    "a resume point at each epoch's end": ("resume.ResumePoint", "on_train_epoch_end"),
}


def shares(root: Path) -> dict[str, float]:
    """The share of `fit`'s time in each of these; of all epochs, validation included."""
    import my_lightning_project.cli as cli

    spent, replaced = dict.fromkeys(ADDED, 0.0), []

    def timed(words: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[words] += time.perf_counter() - start

        return call

    for words, (place, name) in ADDED.items():
        owner = attrgetter(place)(sys.modules[cli.__package__])
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, timed(words, getattr(owner, name)))
    loop, seconds = FitLoop.run, []

    def run(self: Any) -> None:
        start = time.perf_counter()
        loop(self)
        seconds.append(time.perf_counter() - start)

    FitLoop.run = run
    try:
        project_fit(root)
    finally:
        FitLoop.run = loop
        for owner, name, method in replaced:
            setattr(owner, name, method)
    return {words: value / seconds[0] for words, value in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        project, root = generate(Path(name)), Path(name) / "data"
        sys.path.insert(0, str(project))
        write_images(root)
        untracked = ["--trainer.logger", "false", "--registry.enabled", "false"]
        every_step = ["--trainer.log_every_n_steps", "1"]
        arms: dict[str, Callable[[], list[float]]] = {
            "plain loop": lambda: plain_loop(root),
            "fit": lambda: project_fit(root),
            "fit untracked": lambda: project_fit(root, *untracked),
            "fit, a point for every step": lambda: project_fit(root, *every_step),
            "fit, a resume point each second": lambda: project_fit(root, "--last.minutes", str(1 / 60)),
        }
        pairs = [("fit", "plain loop"), ("fit", "fit untracked"), ("fit, a point for every step", "fit untracked")]
        pairs += [("fit, a resume point each second", "fit")]
        ratios: dict[tuple[str, str], list[float]] = {}
        parts: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):
            seconds = {arm: statistics.median(run()) for arm, run in arms.items()}
            if number:  # the first round warms up
                for mine, other in pairs:
                    ratios.setdefault((mine, other), []).append(seconds[other] / seconds[mine])
                for words, value in shares(root).items():
                    parts.setdefault(words, []).append(value)
        print(describe_machine())
        print(f"1 core, {options.rounds} rounds; samples/s of the first over those of the second")
        for (mine, other), values in ratios.items():
            low, high = min(values), max(values)
            print(f"  {mine} / {other}".ljust(54), f"{statistics.median(values):5.2f}   ({low:.2f} to {high:.2f})")
        print("share of the time of fit")
        for words, values in parts.items():
            low, high = min(values), max(values)
            print(f"  {words}".ljust(54), f"{statistics.median(values):6.2%}  ({low:.2%} to {high:.2%})")


if __name__ == "__main__":
    main()
