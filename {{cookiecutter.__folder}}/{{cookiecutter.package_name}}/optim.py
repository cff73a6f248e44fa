"""By which steps which weights change: the optimizer, its parameter groups and its learning-rate schedule."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from . import UserError

RANGES: dict[str, tuple[float, float]] = {"lr": (0, 1e3), "weight_decay": (0, 1e3), "momentum": (0, 0.9999)}
RANGES |= {"warmup_fraction": (0, 1), "backbone_lr_factor": (0, 1), "layer_decay": (0.01, 1)}
NAMES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}


def warmup(step: int, total_steps: int, fraction: float) -> float:
    """Factor on the learning rate: linear from 0 to 1 over a fraction of all steps (arXiv:1706.02677, section 2.2)."""
    return min(1.0, (step + 1) / max(1, round(fraction * total_steps)))


def cosine(step: int, total_steps: int, fraction: float) -> float:
    """Warm-up, then half a cosine down to 0 (arXiv:1608.03983, equation 5, one cycle)."""
    warmup_steps = max(1, round(fraction * total_steps))
    if step < warmup_steps:
        return warmup(step, total_steps, fraction)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def onecycle(step: int, total_steps: int, fraction: float) -> float:
    """Up from 1/25 of the peak and down to 1/25 of 1/10,000 of it, both along half a cosine (arXiv:1708.07120), as
    `torch.optim.lr_scheduler.OneCycleLR` has it; without its cycle of the momentum."""

    def between(start: float, end: float, share: float) -> float:
        return end + (start - end) / 2 * (1 + math.cos(math.pi * share))

    top, last = max(fraction, 1e-9) * total_steps - 1, total_steps - 1
    if step <= top:
        return between(1 / 25, 1.0, step / top if top > 0 else 1.0)
    return between(1.0, 1 / 25e4, min(1.0, (step - top) / max(1e-9, last - top)))


SCHEDULES: dict[str, Callable[[int, int, float], float]] = {"cosine": cosine, "onecycle": onecycle}
SCHEDULES |= {"constant": warmup, "plateau": warmup}


class PlateauOfPeaks(ReduceLROnPlateau):
    """Lowers the peaks that a schedule of steps starts from; `ReduceLROnPlateau` by itself lowers rates that the next
    step of that schedule would set anew."""

    def __init__(self, steps: LambdaLR, **options: Any) -> None:
        self.steps = steps
        super().__init__(steps.optimizer, **options)

    def _reduce_lr(self, epoch: int) -> None:
        self.steps.base_lrs = [max(rate * self.factor, self.min_lrs[0]) for rate in self.steps.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "steps"}  # which has its own


def stages(network: nn.Module) -> list[nn.Module]:
    """The parts of `network.features`, from the inputs on, that rates and freezing tell apart; none without it."""

    def parts(module: nn.Module) -> list[nn.Module]:
        found = [part for part in module.children() if next(part.parameters(), None) is not None]
        if len(found) > 2 or not any(isinstance(part, nn.Sequential) for part in found):
            return found
        return [inner for part in found for inner in (parts(part) if isinstance(part, nn.Sequential) else [part])]

    return parts(dict(network.named_children()).get("features", nn.Identity()))


def parameter_groups(network: nn.Module, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups for the optimizer that hold each parameter once. Matrices and kernels decay, biases and norm layers (one
    axis) do not: that would only change the effective learning rate (arXiv:1812.01187, section 3.1).

    Args:
        network: Without a part `head`, all of it has one rate.
        options: `lr`, of the head; `backbone_lr_factor`, that of the rest as a share of it; `layer_decay`, a further
            factor for each stage on the way from the head to the inputs (arXiv:1801.06146); `weight_decay`.
    """
    parts = stages(network)
    depths = {id(p): len(parts) - row for row, part in enumerate(parts) for p in part.parameters()}  # of the last: 1
    head = {id(p) for p in dict(network.named_children()).get("head", network).parameters()}
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for parameter in (p for p in network.parameters() if p.requires_grad):
        factor = 1.0
        if id(parameter) not in head:
            factor = options["backbone_lr_factor"] * options["layer_decay"] ** depths.get(id(parameter), len(parts))
        decay = options["weight_decay"] if parameter.ndim > 1 else 0.0
        group = {"params": [], "lr": options["lr"] * factor, "weight_decay": decay}
        groups.setdefault((factor, decay), group)["params"].append(parameter)
    return list(groups.values())


def freeze(network: nn.Module, num_frozen: int) -> None:
    """Stop the first stages of a network from learning, the statistics of their batch norms included, and let the rest
    learn. Their gradients are None, so that no optimizer touches them, and none has to be told."""
    for row, part in enumerate(stages(network)):
        part.requires_grad_(row >= num_frozen).train(row >= num_frozen)


def make_optimizer(groups: list[dict[str, Any]], options: Mapping[str, Any], fused: bool) -> Optimizer:
    """The optimizer that `options["optimizer"]` names: `adamw`, `adam`, `sgd` with Nesterov momentum, `lion` from the
    package lion-pytorch, or any class of torch.optim by its name there, such as `RMSprop`.

    Args:
        groups: Parameter groups with their rates.
        options: `optimizer`, `lr`, `momentum`.
        fused: Whether one kernel may do the whole step.

    Raises:
        UserError: There is no such optimizer.
    """
    name, lr = options["optimizer"], options["lr"]
    if name == "lion":
        try:
            from lion_pytorch import Lion
        except ImportError as error:
            raise UserError("model.optimizer lion needs a package: python -m pip install lion-pytorch") from error
        optimizer: Optimizer = Lion(groups, lr=lr)
        return optimizer
    # Names below torch.optim alone: an option may come out of a checkpoint, and must not choose any code there is.
    kind = getattr(torch.optim, NAMES.get(name, name.removeprefix("torch.optim.")), None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer):
        known = ", ".join([*NAMES, "lion"])
        raise UserError(f"model.optimizer is {name!r}; expected one of {known}, or a class of torch.optim.")
    extra: dict[str, Any] = {"fused": fused} if name in NAMES else {}
    if name == "sgd":
        extra |= {"momentum": options["momentum"], "nesterov": options["momentum"] > 0}
    make: Callable[..., Optimizer] = kind
    try:
        return make(groups, lr=lr, **extra)
    except (TypeError, ValueError) as error:  # LBFGS takes no groups, Muon no vectors
        raise UserError(f"model.optimizer {name} can't train this network: {error} Take another.") from error


def configure(
    network: nn.Module, options: Mapping[str, Any], total_steps: float, fused: bool, num_batches: float
) -> Any:
    """Optimizer and schedules, as Lightning wants them.

    Args:
        network: Its parameters are trained.
        options: Those of the task.
        total_steps: Optimizer steps of the whole run.
        fused: Whether one kernel may do the whole step.
        num_batches: Batches of an epoch, accumulated ones counted singly.

    Raises:
        UserError: There is no such optimizer or schedule, or the run has no end that the schedule could lead to.
    """
    name, fraction = options["schedule"], options["warmup_fraction"]
    if name not in SCHEDULES:
        raise UserError(f"model.schedule is {name!r}; expected one of {', '.join(SCHEDULES)}.")
    if not math.isfinite(total_steps):
        raise UserError(f"The {name} schedule needs an end: set trainer.max_epochs or trainer.max_steps.")
    optimizer = make_optimizer(parameter_groups(network, options), options, fused)
    steps = LambdaLR(optimizer, lambda step: SCHEDULES[name](step, int(total_steps), fraction))
    schedules: list[dict[str, Any]] = [{"scheduler": steps, "interval": "step"}]
    if name == "plateau":
        plateau = PlateauOfPeaks(steps, factor=0.3, patience=3)
        # At an epoch's last batch. With "epoch", Lightning 2.6 would step it after the epoch's resume point is written.
        schedules.append(
            {"scheduler": plateau, "interval": "step", "frequency": int(num_batches), "monitor": "val_loss"}
        )
    return [optimizer], schedules
