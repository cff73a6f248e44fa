"""A deep-learning project on PyTorch Lightning. Read model.py, data.py and task.py first; cli.py ties them together."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent

# The recipe lies beside the package in a checkout and inside it in an installed wheel; runs go where the project is.
ROOT = PACKAGE.parent if (PACKAGE.parent / "recipe.yaml").is_file() else Path.cwd()


class UserError(Exception):
    """A mistake that the user can mend. The command line prints the message alone, without a traceback."""


class NoRoom(UserError):
    """A file can't be written. Once it can be, the run goes on."""


class DamagedFile(UserError):
    """A file that is not as it was written."""


class DataFaults(UserError):
    """Everything about the data that must be put right, a line each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join([f"{len(faults)} to put right before training:", *faults]))
        self.faults = faults


def refuse_outside(section: str, values: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse options outside their ranges, both ends included; None means that the option is left to us.

    Raises:
        UserError: Names the first such option, as it is written on the command line.
    """
    for name, (low, high) in ranges.items():
        if values[name] is not None and not low <= values[name] <= high:
            raise UserError(f"{section}.{name} is {values[name]}, expected {low} to {high}. Change --{section}.{name}.")


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
