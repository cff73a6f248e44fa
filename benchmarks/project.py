"""What the benchmarks share: a freshly generated project, and a line about machine and versions."""

import importlib.metadata
import os
import platform
from pathlib import Path

import torch
from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).resolve().parents[1]


def generate(folder: Path) -> Path:
    """A project with the default answers, in a new folder."""
    return Path(cookiecutter(str(TEMPLATE), no_input=True, default_config=True, output_dir=str(folder)))


def describe_machine() -> str:
    """Processor, number of cores and versions, in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    packages = ("torch", "torchvision", "lightning", "pillow", "simplejpeg", "mlflow")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{processor}, {os.cpu_count()} cores, {device}; Python {platform.python_version()}, {versions}"
