"""Which code, versions and machine a run is made of."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys

import lightning as L
import torch

from . import PACKAGE, ROOT


def command_output(*command: str) -> str:
    """What a program prints, or `none` where it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return result.stdout.decode(errors="surrogateescape").rstrip("\n")


def run_facts() -> dict[str, str]:
    """Short facts, for tags."""
    cuda = torch.cuda.is_available()
    commit = command_output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changes = command_output("git", "-C", str(ROOT), "status", "--porcelain")
    driver = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else "none"
    return {
        "git_commit": commit,
        "git_dirty": "unknown" if commit == "none" else str(bool(changes)),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "lightning_version": L.__version__,
        "cuda_version": torch.version.cuda or "none",
        "cudnn_version": str(torch.backends.cudnn.version()) if cuda else "none",
        "driver_version": driver.split("\n")[0],
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "command": shlex.join(["python", "-m", PACKAGE.name, *sys.argv[1:]]),
    }


def run_documents() -> dict[str, bytes]:
    """Longer facts, for files: every installed package, and what in the code differs from its commit."""
    packages = {f"{item.name}=={item.version}" for item in importlib.metadata.distributions()}
    documents = {"environment.txt": "\n".join(sorted(packages, key=str.lower)) + "\n"}
    changes = command_output("git", "-C", str(ROOT), "status", "--porcelain")
    if changes not in ("", "none"):
        patch = command_output("git", "-C", str(ROOT), "diff", "HEAD")
        documents["changes.patch"] = "".join(f"# {line}\n" for line in changes.splitlines()) + patch + "\n"
    return {name: text.encode(errors="surrogateescape") for name, text in documents.items()}
