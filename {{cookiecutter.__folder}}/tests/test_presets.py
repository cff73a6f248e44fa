"""The files in presets/, each of them at work."""

import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from {{ cookiecutter.package_name }}.checkpoints import load_checkpoint
from {{ cookiecutter.package_name }}.cli import RECIPE

PRESETS = RECIPE.parent / "presets"
if not PRESETS.is_dir():
    pytest.skip("presets lie in a checkout, not in an installed package", allow_module_level=True)


@pytest.fixture
def fit(project: Path, command: Callable[..., str]) -> Callable[..., SimpleNamespace]:
    """`fit("debug", ...)` trains with a preset, with neither export nor MLflow; returns its recipe and checkpoint."""

    def run(name: str, *arguments: str) -> SimpleNamespace:
        before = set((project / "runs").glob("20*"))
        alone = ["--trainer.logger", "false", "--onnx.enabled", "false", "--registry.enabled", "false"]
        command("fit", "--config", str(PRESETS / f"{name}.yaml"), *alone, *arguments)
        (folder,) = set((project / "runs").glob("20*")) - before
        recipe: dict[str, Any] = yaml.safe_load((folder / "recipe.yaml").read_text("utf-8"))
        return SimpleNamespace(recipe=recipe, last=load_checkpoint(str(folder / "checkpoints" / "last.ckpt")))

    return run


def test_debug_learns_one_batch_by_heart(fit: Callable[..., SimpleNamespace]) -> None:
    losses = fit("debug").last["callbacks"]["Curves"]["losses"]
    assert (len(losses), losses[-1][0] < 0.05) == (50, True)  # untrained 2.3


def test_profile_leaves_a_table_and_a_trace(
    fit: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="Profiler clears events"):  # of each cycle, which is what is wanted
        fit("profile")
    names = [path.name for path in (tmp_path / "runs" / "profile").iterdir()]
    assert "aten::" in (tmp_path / "runs" / "profile" / "fit-profile.txt").read_text()
    assert any(name.endswith(".pt.trace.json") for name in names)


def test_fashion_mnist_trains_the_network_of_the_worked_example(
    fit: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    bunch, raw = load_digits(), tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, rows in (("train", slice(0, 1200)), ("t10k", slice(1200, 1400))):
        images = [Image.fromarray((item * 15).astype(np.uint8)).resize((28, 28)) for item in bunch.images[rows]]
        pixels, labels = np.stack([np.asarray(image) for image in images]), bunch.target[rows].astype(np.uint8)
        head = struct.pack(">4I", 0x803, len(images), 28, 28), struct.pack(">2I", 0x801, len(images))
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(head[0] + pixels.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(head[1] + labels.tobytes())
    run = fit("fashion_mnist", "--data.data_dir", str(tmp_path))
    shapes = [tuple(v.shape) for k, v in run.last["state_dict"].items() if k.endswith(("weight", "bias"))]
    assert shapes == [(256, 784), (256,), (10, 256), (10,)]
    assert run.last["global_step"] == 10 * (1000 // 128)  # a sixth is for validation
    assert run.last["callbacks"]["Curves"]["losses"][-1][1] < 1.0  # untrained 2.3


def test_finetune_trains_the_head_first_and_the_rest_more_slowly(
    fit: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    name = "shufflenet_v2_x0_5"  # lighter than the preset's own
    weights = torchvision.models.get_model(name, weights=None).state_dict()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = tmp_path / "hub" / "checkpoints" / torchvision.models.get_model_weights(name).DEFAULT.url.split("/")[-1]
    path.parent.mkdir(parents=True)
    torch.save(weights, path)
    short = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "3", "--trainer.limit_val_batches", "1"]
    run = fit("finetune", "--model.backbone", name, "--data.image_size", "32", *short)
    rates = sorted({group["initial_lr"] for group in run.last["optimizer_states"][0]["param_groups"]})
    body = {key: value for key, value in run.last["state_dict"].items() if key.startswith("network.features.")}
    assert all(torch.equal(value, weights[key.removeprefix("network.features.")]) for key, value in body.items())
    assert (rates[-1], rates[-2]) == (pytest.approx(1e-3), pytest.approx(1e-3 * 0.1 * 0.8))


def test_fast_lets_the_device_choose(fit: Callable[..., SimpleNamespace]) -> None:
    recipe = fit("fast", "--model.compile", "false", "--trainer.max_epochs", "1").recipe  # compiling has its own test
    content = yaml.safe_load((PRESETS / "fast.yaml").read_text("utf-8"))
    assert (recipe["trainer"]["deterministic"], recipe["trainer"]["benchmark"]) == (False, True)
    assert content["model"]["compile"] is True


def test_presets_stack(fit: Callable[..., SimpleNamespace]) -> None:
    recipe = fit("fast", "--config", str(PRESETS / "debug.yaml"), "--model.compile", "false").recipe
    assert (recipe["trainer"]["benchmark"], recipe["trainer"]["overfit_batches"]) == (True, 1)
