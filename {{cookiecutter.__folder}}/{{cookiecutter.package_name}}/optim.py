"""By which steps the weights change: the optimizer and its learning-rate schedule."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn

from . import UserError
from .model import parameter_groups


def warmup_cosine(step: int, total_steps: int, warmup_fraction: float) -> float:
    """Factor on the learning rate at an optimizer step: linear from 0 to 1, then half a cosine down to 0.

    Depends on nothing but its arguments, so that a resumed run with another `max_epochs` takes up the new schedule.
    Source: arXiv:1608.03983, equation 5, one cycle; warm-up as in arXiv:1706.02677, section 2.2.
    """
    warmup_steps = max(1, round(warmup_fraction * total_steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def configure(network: nn.Module, options: Mapping[str, Any], total_steps: float) -> OptimizerLRSchedulerConfig:
    """Optimizer and schedule, as Lightning wants them.

    Args:
        network: Its parameters are trained.
        options: Those of the task: `lr`, `weight_decay`, `warmup_fraction`.
        total_steps: Optimizer steps of the whole run.

    Raises:
        UserError: The run has no end that the schedule could lead to.
    """
    if not math.isfinite(total_steps):
        raise UserError("The cosine schedule needs an end: set trainer.max_epochs or trainer.max_steps.")
    # Not fused: Lightning 2.6 can't clip gradients of a fused optimizer under 16-mixed (pytorch-lightning#21435).
    optimizer = torch.optim.AdamW(parameter_groups(network, options["weight_decay"]), lr=options["lr"])
    warmup_fraction = options["warmup_fraction"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, int(total_steps), warmup_fraction)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
