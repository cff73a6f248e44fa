"""Optimizers and schedules by name, the rates of each part of the network, and freezing."""

import math
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.optim import (
    SCHEDULES,
    configure,
    cosine,
    freeze,
    make_optimizer,
    onecycle,
    parameter_groups,
    stages,
)
from {{ cookiecutter.package_name }}.task import ClassificationTask

OPTIONS: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 0.1,
    "momentum": 0.9,
    "schedule": "cosine",
    "warmup_fraction": 0.1,
}
OPTIONS |= {"backbone_lr_factor": 1.0, "layer_decay": 1.0, "weight_decay": 0.01}


def groups() -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(2, 2))]}]


class Rates(L.Callback):
    """Keeps the learning rates of all groups at each step, and which parameters learn in each epoch."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.learning: list[list[bool]] = []
        self.statistics: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        parts = stages(pl_module.network)
        self.learning.append([next(part.parameters()).requires_grad for part in parts])
        self.statistics.append(parts[0][1].running_mean.clone())


@pytest.fixture
def train(make_trainer: Callable[..., L.Trainer]) -> Callable[..., Rates]:
    """`train(epochs=2, optimizer="sgd")` trains on batches of 256 digits, five an epoch."""

    def run(epochs: int = 1, trainer: dict[str, Any] | None = None, **options: Any) -> Rates:
        rates, task = Rates(), ClassificationTask(width=2, **options)
        make_trainer(max_epochs=epochs, callbacks=[rates], **(trainer or {})).fit(task, DataModule(batch_size=256))
        return rates

    return run


# Optimizers


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", "AdamW"), ("adam", "Adam"), ("sgd", "SGD"), ("RMSprop", "RMSprop"), ("torch.optim.NAdam", "NAdam")],
)
def test_optimizers_are_chosen_by_name(name: str, kind: str) -> None:
    assert type(make_optimizer(groups(), {**OPTIONS, "optimizer": name}, fused=False)).__name__ == kind


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_has_nesterov_momentum(momentum: float) -> None:
    optimizer = make_optimizer(groups(), {**OPTIONS, "optimizer": "sgd", "momentum": momentum}, fused=False)
    assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (momentum, momentum > 0)


@pytest.mark.parametrize("name", ["adamm", "Optimizer", "lr_scheduler", "os.system", "torch.optim.swa_utils", ""])
def test_what_is_no_optimizer_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected one of adamw, adam, sgd, lion, or a class of torch.optim"):
        make_optimizer(groups(), {**OPTIONS, "optimizer": name}, fused=False)


@pytest.mark.parametrize("name", ["LBFGS", "Muon"])
def test_optimizers_that_do_not_fit_are_refused(task: ClassificationTask, name: str) -> None:
    with pytest.raises(UserError, match=f"model.optimizer {name} can't train this network: .* Take another"):
        make_optimizer(parameter_groups(task.network, OPTIONS), {**OPTIONS, "optimizer": name}, fused=False)


def test_lion_takes_steps_of_the_sign() -> None:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    optimizer = make_optimizer(parts := groups(), {**OPTIONS, "optimizer": "lion"}, fused=False)
    parts[0]["params"][0].square().sum().backward()
    optimizer.step()
    assert isinstance(optimizer, lion_pytorch.Lion) and torch.allclose(parts[0]["params"][0], torch.tensor(0.9))


def test_lion_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(UserError, match="pip install lion-pytorch"):
        make_optimizer(groups(), {**OPTIONS, "optimizer": "lion"}, fused=False)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "RMSprop"])
def test_optimizers_lower_the_loss(name: str, make_trainer: Callable[..., L.Trainer]) -> None:
    task = ClassificationTask(width=8, optimizer=name, lr=0.05 if name == "sgd" else 0.003)
    trainer = make_trainer(max_epochs=4)
    trainer.fit(task, DataModule(batch_size=64))
    assert float(trainer.callback_metrics["val_loss"]) < 0.7 * math.log(10)


@pytest.mark.parametrize(
    ("clip", "precision", "fused"), [(1.0, "32-true", True), (1.0, "bf16-mixed", False), (None, "bf16-mixed", True)]
)
def test_one_kernel_does_the_step_where_lightning_allows_it(
    make_trainer: Callable[..., L.Trainer], clip: float | None, precision: str, fused: bool
) -> None:
    trainer = make_trainer(max_epochs=1, gradient_clip_val=clip, precision=precision, limit_train_batches=2)
    trainer.fit(ClassificationTask(width=2), DataModule(batch_size=64))
    assert trainer.optimizers[0].param_groups[0]["fused"] is fused


# Schedules


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5])
def test_onecycle_is_that_of_torch(fraction: float) -> None:
    optimizer = torch.optim.SGD(groups(), lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=50, pct_start=fraction, cycle_momentum=False
    )
    for step in range(50):
        assert 0.1 * onecycle(step, 50, fraction) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        if step < 49:
            theirs.step()


def test_cosine_after_warmup_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD(groups(), lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90)
    for step in range(90):
        assert cosine(step + 10, 100, 0.1) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", ["cosine", "onecycle", "constant"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_rates_of_a_run_follow_the_formula_at_each_step(
    train: Callable[..., Rates], name: str, accumulate: int
) -> None:
    rates = train(4, {"accumulate_grad_batches": accumulate}, schedule=name, lr=0.01, warmup_fraction=0.25).rates
    steps = [batch // accumulate if accumulate == 1 else 3 * (batch // 5) + batch % 5 // 2 for batch in range(20)]
    total = 20 if accumulate == 1 else 12  # an epoch of five batches has two steps of two and one of a single batch
    expected = [0.01 * SCHEDULES[name](step, total, 0.25) for step in steps]
    assert [rate[0] for rate in rates] == pytest.approx(expected)


def test_plateau_lowers_the_rate_when_val_loss_no_longer_improves(train: Callable[..., Rates]) -> None:
    rates = train(8, schedule="plateau", lr=1e-9, warmup_fraction=0.1).rates  # so small a rate improves nothing
    warm, later = [rate[0] for rate in rates[:4]], [rate[0] for rate in rates[-5:]]
    assert warm == pytest.approx([0.25e-9, 0.5e-9, 0.75e-9, 1e-9]) and later == pytest.approx([0.3e-9] * 5, rel=0.01)


def test_plateau_survives_a_checkpoint() -> None:
    network = nn.Module()
    network.features, network.head = nn.Linear(2, 2), nn.Linear(2, 2)
    (optimizer,), (steps, plateau) = configure(
        network, {**OPTIONS, "schedule": "plateau"}, 100, fused=False, num_batches=5
    )
    for loss in [1.0] * 5:
        plateau["scheduler"].step(loss)
    (_,), (steps_again, plateau_again) = configure(
        network, {**OPTIONS, "schedule": "plateau"}, 100, fused=False, num_batches=5
    )
    steps_again["scheduler"].load_state_dict(steps["scheduler"].state_dict())
    plateau_again["scheduler"].load_state_dict(plateau["scheduler"].state_dict())
    assert steps_again["scheduler"].base_lrs == pytest.approx([0.03] * 2)
    assert plateau_again["scheduler"].steps is steps_again["scheduler"]


def test_unknown_schedule_is_refused(train: Callable[..., Rates]) -> None:
    with pytest.raises(UserError, match="model.schedule is 'linear'; expected one of cosine"):
        train(schedule="linear")


# Rates of the parts of a network


def test_rates_fall_from_the_head_to_the_inputs(task: ClassificationTask) -> None:
    parts = parameter_groups(task.network, {**OPTIONS, "backbone_lr_factor": 0.5, "layer_decay": 0.1})
    rates = {id(p): group["lr"] for group in parts for p in group["params"]}
    found = [rates[id(next(part.parameters()))] for part in stages(task.network)]
    assert found == pytest.approx([0.1 * 0.5 * 0.1**depth for depth in (4, 3, 2, 1)])
    assert {rates[id(p)] for p in task.network.head.parameters()} == {0.1}


def test_each_parameter_is_in_one_group_whatever_the_rates(task: ClassificationTask) -> None:
    parts = parameter_groups(task.network, {**OPTIONS, "backbone_lr_factor": 0.5, "layer_decay": 0.7})
    grouped = [id(p) for group in parts for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in task.network.parameters())


def test_groups_keep_their_ratio_through_a_run(train: Callable[..., Rates]) -> None:
    rates = train(2, backbone_lr_factor=0.1, lr=0.01).rates
    assert all(max(rate) == pytest.approx(10 * min(rate)) for rate in rates)


# Freezing


def test_stages_are_freed_from_the_head_to_the_inputs(train: Callable[..., Rates]) -> None:
    rates = train(5, unfreeze_every=1)
    assert rates.learning == [[epoch > 3 - row for row in range(4)] for epoch in range(5)]


def test_frozen_stages_stay_as_they_are_their_statistics_too(train: Callable[..., Rates]) -> None:
    frozen, free = train(2, unfreeze_every=2), train(2)
    assert all(not bool(value.any()) for value in frozen.statistics) and bool(free.statistics[0].any())


def test_a_frozen_stage_keeps_its_weights(task: ClassificationTask, digits: DataModule) -> None:
    freeze(task.network, 2)
    before = {name: value.clone() for name, value in task.network.state_dict().items()}
    optimizer = make_optimizer(parameter_groups(task.network, OPTIONS), OPTIONS, fused=False)
    inputs, targets = digits.splits["train"].__getitems__(list(range(32)))
    task.loss(task(inputs), targets).backward()
    optimizer.step()
    changed = {
        name.split(".")[1]
        for name, value in task.network.features.state_dict(prefix="features.").items()
        if not value.equal(before[name])
    }
    assert changed >= {"2", "3"} and changed.isdisjoint({"0", "1"})


def test_rate_of_a_freed_stage_is_that_of_the_schedule(train: Callable[..., Rates]) -> None:
    frozen, free = train(3, unfreeze_every=1, backbone_lr_factor=0.5), train(3, backbone_lr_factor=0.5)
    assert frozen.rates == free.rates


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_false"])
def test_freeing_stages_on_several_devices_needs_the_strategy_that_allows_it(
    task: ClassificationTask, make_trainer: Callable[..., L.Trainer], strategy: str
) -> None:
    task.hparams["unfreeze_every"] = 1
    task.trainer = make_trainer(max_epochs=1, devices=2, strategy=strategy)
    with pytest.raises(UserError, match="unfreeze_every needs --trainer.strategy ddp_find_unused_parameters_true"):
        task.on_train_start()
    task.trainer = make_trainer(max_epochs=1, devices=2, strategy="ddp_find_unused_parameters_true")
    task.on_train_start()
