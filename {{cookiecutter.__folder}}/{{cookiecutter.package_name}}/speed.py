"""Which is faster, the loader or the device; and what a run will take in time, memory and money."""

import copy
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning import LightningDataModule, Trainer
from torch import Tensor

from . import usable_cores
from .images import Files
from .latency import peak_memory_mb

SECONDS = 1.0  # of measuring for each figure, after a tenth of it, or one batch, that does not count
DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def cpu_precision() -> str:
    """bfloat16 where the processor multiplies matrices of it, twice to three times as fast as float32; else float32."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not there before torch 2.11
    return "bf16-mixed" if capabilities.get("amx_bf16") else "32-true"


def rate(batches: Iterator[int], device: torch.device) -> float:
    """Samples per second at which an endless iterator of batch sizes runs on a device."""
    start, samples = time.perf_counter(), 0
    while samples == 0 or time.perf_counter() - start < SECONDS / 10:  # what happens once, such as choosing kernels
        samples += next(batches)
    synchronize(device)
    start, samples = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < SECONDS:
        samples += next(batches)
    synchronize(device)
    return samples / max(spent, time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training(
    task: Any, datamodule: LightningDataModule, batch: tuple[Tensor, Tensor], device: Any, precision: str
) -> Any:
    """Endless training steps of a copy of the task on one batch that lies on the device; yields batch sizes."""
    task = copy.deepcopy(task).to(device).train()
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-6)
    images, labels = (item.to(device) for item in batch)
    while True:
        inputs, targets = datamodule.augment((images, labels))
        with torch.autocast(device.type, DTYPES.get(precision), enabled=precision in DTYPES):
            loss = task.loss(task(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield len(inputs)


def peak_memory(device: torch.device) -> str:
    """In words: of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB of the GPU's memory"
    return f"{peak_memory_mb() / 2**10:.2f} GiB of memory"


def advice(loader: Any) -> str:
    """Which setting to change so that the loader gets faster."""
    if isinstance(loader.dataset.images, Files):
        needed = math.prod(loader.dataset.images.shape)
        return f"set --data.cache_gb {math.ceil(needed / 2**30)}, so that files are decoded once"
    if loader.num_workers < usable_cores() - 1:
        return f"set --data.num_workers {min(8, usable_cores())}, now {loader.num_workers}"
    return "set --data.image_size lower, or take a machine with more cores"


def in_words(seconds: float) -> str:
    """A duration with the unit that suits it."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds > 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def speed(
    trainer: Trainer,
    task: Any,
    datamodule: LightningDataModule,
    loader: Any,
    batch: tuple[Tensor, Tensor],
    price_per_hour: float | None,
) -> list[str]:
    """Measure loader and device for a second each, and say which of them is slower, what to change, and what a run
    takes; with a price, also what it costs, and which batch size and precision would be cheaper.

    Args:
        trainer: Knows device, precision and length of the run.
        task: Built for the data; copies of it are trained.
        datamodule: Augments the batches.
        loader: That of the training split.
        batch: One of its batches.
        price_per_hour: In any currency.
    """
    device, precision, num_devices = trainer.strategy.root_device, str(trainer.precision), trainer.world_size
    sizes = (len(inputs) for inputs, _ in itertools.chain.from_iterable(itertools.repeat(loader)))
    loaded = rate(sizes, torch.device("cpu"))
    used = rate(training(task, datamodule, batch, device, precision), device)
    wait = 1 / loaded if loader.num_workers == 0 else max(0.0, 1 / loaded - 1 / used)  # seconds, for each sample
    share = wait / (wait + 1 / used)
    verdict = "fine" if share < 0.1 else f"it will wait {share:.0%} of the time; {advice(loader)}"
    steps = trainer.max_steps if trainer.max_steps > 0 else (trainer.max_epochs or 0) * len(loader)
    samples = max(0, steps) * len(batch[0]) * num_devices * trainer.accumulate_grad_batches ** (trainer.max_steps > 0)
    seconds = samples * (wait + 1 / used) / num_devices
    lines = [
        f"  the loader delivers {loaded:,.0f} samples/s, the device uses {used:,.0f}: {verdict}",
        f"  training would take about {in_words(seconds)} if it does not stop early; peak {peak_memory(device)}",
    ]
    if price_per_hour is None:
        return lines
    lines.append(f"  that costs {seconds / 3600 * price_per_hour:.3g}; by batch size and precision, loader left aside:")
    choices = {precision, "32-true", "bf16-mixed", *(["16-mixed"] if device.type == "cuda" else [])}
    rows = []
    for factor, choice in itertools.product((1, 2, 4), sorted(choices)):
        wide = torch.cat([batch[0]] * factor), torch.cat([batch[1]] * factor)
        per_second = rate(training(task, datamodule, wide, device, choice), device)
        cost = samples / per_second / num_devices / 3600 * price_per_hour
        rows.append((cost, f"    batch {len(wide[0]):5} {choice:10} {per_second:9,.0f} samples/s, {cost:.3g}"))
    cheapest = min(rows)
    return lines + [line + ", the cheapest" * (row is cheapest) for row in rows for _, line in [row]]
