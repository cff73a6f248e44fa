"""The command line: its commands, its defaults from recipe and checkpoint, and its answers to mistakes."""

import csv
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from PIL import Image

from {{ cookiecutter.package_name }} import PACKAGE, __main__
from {{ cookiecutter.package_name }}.checkpoints import checkpoint_options, load_checkpoint
from {{ cookiecutter.package_name }}.cli import CLI, run
from {{ cookiecutter.package_name }}.images import file_hash
from {{ cookiecutter.package_name }}.runs import RunFolder
from {{ cookiecutter.package_name }}.speed import cpu_precision

Command = Callable[..., str]


def error(capfd: pytest.CaptureFixture[str], command: Command, *arguments: str) -> tuple[Any, list[str]]:
    """What a command that fails answers: its exit code or message, and the lines on standard error."""
    with pytest.raises(SystemExit) as caught:
        command(*arguments)
    return caught.value.code, capfd.readouterr().err.splitlines()


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["project", *arguments])
    __main__.main()


@pytest.mark.parametrize("name", __main__.COMMANDS)
def test_a_command_builds_its_own_options_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "argv", ["project", name])
    assert set(CLI.subcommands()) == {name}


def test_the_list_of_commands_costs_no_import_of_torch() -> None:
    code = f"import sys, runpy; sys.argv[1:] = ['--help']; runpy.run_module({PACKAGE.name!r}, run_name='__main__')"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True).returncode == 0


def test_a_mistyped_command_is_answered_with_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="'tset' is no command. Did you mean test"):
        main(monkeypatch, "tset")


def test_a_mistyped_option_is_answered_in_three_lines(capfd: pytest.CaptureFixture[str], command: Command) -> None:
    code, lines = error(capfd, command, "fit", "--model.widht=3")
    assert (code, len(lines), lines[1]) == (2, 3, "Did you mean --model.width?")


def test_a_value_of_the_wrong_type_is_answered_in_two_lines(
    capfd: pytest.CaptureFixture[str], command: Command
) -> None:
    code, lines = error(capfd, command, "fit", "--model.lr", "fast")
    assert (code, len(lines), "model.lr" in lines[0]) == (2, 2, True)


def test_the_recipe_is_found_from_another_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", PACKAGE.name, "fit", "--print_config"]
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "PYTHONWARNINGS": "ignore"}
    output = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert yaml.safe_load(output)["trainer"]["gradient_clip_val"] == 1.0


def test_the_recipe_asks_for_what_the_rules_ask_for(recipe: dict[str, Any]) -> None:
    trainer = recipe["trainer"]
    values = [recipe["seed_everything"], trainer["deterministic"], trainer["precision"], trainer["gradient_clip_val"]]
    assert values == [42, True, "16-mixed", 1.0]


def test_batch_size_of_the_recipe_is_a_multiple_of_8(recipe: dict[str, Any]) -> None:
    assert recipe["data"]["batch_size"] % 8 == 0


def test_early_stopping_of_the_recipe_can_fire(recipe: dict[str, Any]) -> None:
    assert recipe["early_stopping"]["patience"] < recipe["trainer"]["max_epochs"]


def test_fit_stops_when_val_loss_no_longer_improves_and_measures_the_best(project: Path, small_fit: Command) -> None:
    before = set((project / "runs").glob("*"))
    constant = ["--model.backbone", "mlp", "--model.lr", "0", "--model.weight_decay", "0"]
    small_fit(*constant, "--early_stopping.patience", "2", "--trainer.max_epochs", "9")
    (folder,) = set((project / "runs").glob("*")) - before
    epochs = [load_checkpoint(str(folder / "checkpoints" / f"{name}.ckpt"))["epoch"] for name in ("best", "last")]
    measured = json.loads((folder / "metrics.json").read_text())["checkpoint_sha256"]
    assert (epochs, measured) == ([0, 2], file_hash(folder / "checkpoints" / "best.ckpt"))


def test_each_fit_has_a_folder_of_its_own(project: Path, small_fit: Command) -> None:
    before = set((project / "runs").glob("*"))
    small_fit("--trainer.max_epochs", "1")
    small_fit("--trainer.max_epochs", "1")
    assert len(set((project / "runs").glob("*")) - before) == 2


def test_runs_of_the_same_second_have_folders_of_their_own(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("{{ cookiecutter.package_name }}.runs.RUNS", tmp_path)
    run_folder = RunFolder(ArgumentParser(), Namespace(ckpt_path=None))
    assert len({run_folder.make() for _ in range(2)}) == 2


def test_a_precision_that_needs_cuda_is_replaced_with_a_word(
    caplog: pytest.LogCaptureFixture, small_fit: Command
) -> None:
    with caplog.at_level("INFO"):
        small_fit("--trainer.max_epochs", "1")
    assert f"precision: 16-mixed needs CUDA, so this run computes in {cpu_precision()}" in caplog.text


def test_the_resolved_recipe_lies_with_the_run(trained: SimpleNamespace) -> None:
    resolved = yaml.safe_load((trained.folder / "recipe.yaml").read_text("utf-8"))
    assert (resolved["model"]["width"], resolved["trainer"]["max_epochs"]) == (4, 3)


def test_a_checkpoint_brings_its_options(trained: SimpleNamespace) -> None:
    options = checkpoint_options(load_checkpoint(str(trained.best)))
    assert (options["model"]["width"], options["data"]["batch_size"], options["seed_everything"]) == (4, 256, 42)


def test_a_network_of_another_width_is_measured_as_it_was_trained(trained: SimpleNamespace, command: Command) -> None:
    assert "test_acc" in command("test", str(trained.best))


def test_an_option_that_is_set_wins_over_the_checkpoint_s(
    capsys: pytest.CaptureFixture[str], trained: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--ckpt_path", str(trained.best), "--data.batch_size", "8", "--print_config"]
    monkeypatch.setattr(sys, "argv", ["project", "fit", *options])
    with pytest.raises(SystemExit):
        run()
    assert yaml.safe_load(capsys.readouterr().out)["data"]["batch_size"] == 8


def test_a_resume_with_another_learning_rate_is_refused(
    capfd: pytest.CaptureFixture[str], trained: SimpleNamespace, command: Command
) -> None:
    code, _ = error(capfd, command, "fit", "--ckpt_path", str(trained.last), "--model.lr", "0.5")
    assert code.startswith("error: model.lr is 0.5, but 0.003 in the checkpoint")


def test_predict_writes_file_class_and_probability(trained: SimpleNamespace, command: Command, tmp_path: Path) -> None:
    for index in range(3):
        Image.fromarray(np.full((9, 9), 40 * index, np.uint8)).save(tmp_path / f"{index}.png")
    command("predict", str(tmp_path), "--ckpt_path", str(trained.best))
    with (trained.folder / f"predictions-{tmp_path.name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(Path(row["file"]).name, 0 < float(row["probability"]) <= 1) for row in rows] == [
        ("0.png", True),
        ("1.png", True),
        ("2.png", True),
    ]


def test_without_a_checkpoint_the_first_step_is_named(
    capfd: pytest.CaptureFixture[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("{{ cookiecutter.package_name }}.runs.RUNS", tmp_path)
    code, _ = error(capfd, command, "test")
    assert code.startswith(f"error: There is no checkpoint in {tmp_path} yet. Train first")


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut off"])
def test_a_damaged_checkpoint_is_named(
    capfd: pytest.CaptureFixture[str], command: Command, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(content)
    code, _ = error(capfd, command, "test", str(path))
    assert code.startswith(f"error: {path} can't be read as a checkpoint: ")


class Attack:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_code_in_a_checkpoint_is_not_run(
    capfd: pytest.CaptureFixture[str], command: Command, tmp_path: Path, save: Callable[[Any, Path], Any]
) -> None:
    save({"hyper_parameters": Attack(tmp_path / "executed")}, tmp_path / "attack.ckpt")
    code, _ = error(capfd, command, "test", str(tmp_path / "attack.ckpt"))
    assert (code.startswith("error: "), (tmp_path / "executed").exists()) == (True, False)


def test_weights_without_hyperparameters_are_refused(
    capfd: pytest.CaptureFixture[str], command: Command, tmp_path: Path
) -> None:
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    code, _ = error(capfd, command, "test", str(tmp_path / "weights.ckpt"))
    assert "it is no checkpoint of this project's `fit`" in code


@pytest.mark.parametrize(("capabilities", "precision"), [({"amx_bf16": True}, "bf16-mixed"), ({}, "32-true")])
def test_precision_without_cuda_is_what_the_processor_is_fast_with(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], precision: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert cpu_precision() == precision
