"""What is said of curves: overfitting, and a validation loss that never improved."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from {{ cookiecutter.package_name }} import curves
from {{ cookiecutter.package_name }}.curves import Curves


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`said(train=[...], val=[...])` goes through epochs with these losses; returns the lines that came of it."""
    lines: list[str] = []
    monkeypatch.setattr(curves, "rank_zero_info", lines.append)

    def run(train: list[float], val: list[float], curves: Curves | None = None) -> list[str]:
        callback = curves or Curves(patience=3)
        trainer: Any = SimpleNamespace(callback_metrics={})
        for one, other in zip(train, val, strict=True):
            trainer.callback_metrics = {"train_loss": torch.tensor(one), "val_loss": torch.tensor(other)}
            callback.on_train_epoch_end(trainer, None)
        callback.on_train_end(trainer, None)
        return lines

    return run


def test_a_gap_that_keeps_growing_is_called_overfitting_once(said: Callable[..., list[str]]) -> None:
    (line,) = said(train=[1.0, 0.8, 0.6, 0.4, 0.2, 0.1], val=[1.0, 0.9, 0.95, 1.0, 1.1, 1.2])
    assert line.startswith("overfitting: for 3 epochs train_loss (0.4000) and val_loss (1.0000, at best 0.9000)")


@pytest.mark.parametrize(
    "val",
    [
        [1.0, 0.95, 0.9, 0.85, 0.8],  # grows, but validation still gets better
        [1.0, 0.8, 0.9, 1.1, 0.85],  # got better again in between
        [1.0, 0.8, 0.61, 0.41, 0.21],  # both fall alike
    ],
)
def test_sound_curves_are_not_commented(said: Callable[..., list[str]], val: list[float]) -> None:
    assert said(train=[1.0, 0.8, 0.6, 0.4, 0.2], val=val) == []


def test_a_validation_loss_that_never_improved_is_named(said: Callable[..., list[str]]) -> None:
    (line,) = said(train=[1.0, 1.1, 1.2], val=[1.0, 1.1, 1.2])
    assert line.startswith("val_loss never improved after the first epoch (1.0000)")


def test_a_resumed_run_remembers_the_curves(said: Callable[..., list[str]]) -> None:
    first, second = Curves(patience=3), Curves(patience=3)
    assert said(train=[1.0, 0.8], val=[0.9, 1.0], curves=first) == []
    second.load_state_dict(first.state_dict())
    assert said(train=[0.6, 0.4], val=[1.1, 1.2], curves=second)[0].startswith("overfitting")
