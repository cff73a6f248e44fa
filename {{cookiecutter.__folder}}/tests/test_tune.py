"""Suggestions for learning rate and batch size."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from {{ cookiecutter.package_name }}.tune import steepest

RATES = [10 ** (-6 + row * 6 / 99) for row in range(100)]


def test_suggested_rate_is_where_the_loss_falls_fastest() -> None:
    losses = [2 / (1 + math.exp(3 * math.log10(rate / 1e-3))) for rate in RATES]
    assert steepest(RATES, losses) == pytest.approx(1e-3, rel=0.2)


def test_where_the_loss_falls_nowhere_nothing_is_suggested() -> None:
    assert steepest(RATES, [1.0 + rate for rate in RATES]) is None


def test_losses_that_are_not_finite_are_left_out() -> None:
    losses = [2 / (1 + math.exp(3 * math.log10(rate / 1e-3))) if rate < 0.1 else math.nan for rate in RATES]
    assert steepest(RATES, losses) == pytest.approx(1e-3, rel=0.2)


def test_the_command_suggests_both_and_leaves_nothing(command: Callable[..., str], project: Path) -> None:
    before = {path for path in project.rglob("*") if "mlflow" not in path.name}
    output = command("tune", "--batch_size", "true", "--model.width", "4", "--trainer.logger", "false")
    rate, size = (line.rsplit(" ", 1)[1] for line in output.splitlines())
    assert (1e-4 < float(rate) < 1, size) == (True, "1024")  # of 1,297 samples
    assert {path for path in project.rglob("*") if "mlflow" not in path.name} == before


def test_a_network_that_learns_nothing_is_named(command: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("{{ cookiecutter.package_name }}.tune.steepest", lambda lr, loss: None)
    with pytest.raises(SystemExit, match="The loss falls at no learning rate"):
        command("tune", "--model.width", "4", "--trainer.logger", "false")
