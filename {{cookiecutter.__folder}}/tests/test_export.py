"""The ONNX file: equal to PyTorch, complete in itself, described by its contract, and measured."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from {{ cookiecutter.package_name }} import PACKAGE, UserError
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.export import OnnxExport, export_summary, freeze, measure_latency, write_onnx
from {{ cookiecutter.package_name }}.images import file_hash
from {{ cookiecutter.package_name }}.latency import measure
from {{ cookiecutter.package_name }}.parity import random_inputs, verify
from {{ cookiecutter.package_name }}.task import ClassificationTask

TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


class Flat(nn.Module):
    """One matrix on raw images; subclasses change what would be missed if no one looked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(images.float().flatten(1) / 255)
        return logits


class AlwaysDropping(Flat):
    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(images), 0.5, training=True)


class Squeezing(Flat):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).squeeze(0)  # loses the batch axis where a batch has one image


class Averaging(Flat):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).mean(dim=0, keepdim=True)  # one row for the whole batch


class OtherOnBlack(Flat):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + (images.flatten(1).amax(1, keepdim=True) == 0)


class Half(Flat):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).to(torch.float16)


@pytest.fixture(scope="session")
def contract(trained: SimpleNamespace) -> dict[str, Any]:
    """The contract of the export that `fit` made."""
    content: dict[str, Any] = json.loads((trained.folder / "export" / "contract.json").read_text("utf-8"))
    return content


@pytest.fixture
def session(trained: SimpleNamespace) -> Any:
    """The exported file in ONNX Runtime."""
    return ort.InferenceSession(str(trained.folder / "export" / "model.onnx"), providers=["CPUExecutionProvider"])


@pytest.fixture
def copied(trained: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the trained run's folder, to be spoilt."""
    return shutil.copytree(trained.folder, tmp_path / "run")


@pytest.fixture
def export_again(digits: DataModule, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`export_again(folder)` exports a run's best checkpoint, and returns the folder of the export."""

    def run(folder: Path, **options: Any) -> Path:
        monkeypatch.chdir(folder)
        callback = OnnxExport(**{"batch_sizes": [], **options})
        callback.run(ClassificationTask, digits, folder / "checkpoints" / "best.ckpt")
        return folder / "export"

    return run


@pytest.fixture
def verify_network(task: ClassificationTask, digits: DataModule, tmp_path: Path) -> Callable[[nn.Module], Any]:
    """`verify_network(network)` exports a network in place of the task's own, and proves it equal."""

    def run(network: nn.Module) -> dict[str, Any]:
        task.network = network
        frozen = freeze(network)
        write_onnx(frozen, digits.input_spec, tmp_path / "model.onnx")
        return verify(task.eval(), frozen, tmp_path / "model.onnx", digits.splits["val"], TOLERANCE)

    return run


# What is in the file


def test_export_is_one_file_and_its_contract(trained: SimpleNamespace) -> None:
    assert sorted(path.name for path in (trained.folder / "export").iterdir()) == ["contract.json", "model.onnx"]


def test_file_works_alone_wherever_it_lies(trained: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copy(trained.folder / "export" / "model.onnx", tmp_path / "x.onnx")
    session = ort.InferenceSession(str(tmp_path / "x.onnx"), providers=["CPUExecutionProvider"])
    assert session.run(None, {"images": np.zeros((1, 1, 8, 8), np.uint8)})[0].shape == (1, 10)


def test_file_gives_the_logits_of_the_checkpoint(trained: SimpleNamespace, digits: DataModule, session: Any) -> None:
    task = ClassificationTask.load_from_checkpoint(trained.best, map_location="cpu", weights_only=True).eval()
    images, _ = digits.splits["test"].__getitems__(list(range(50)))
    with torch.no_grad():
        expected = task(images)
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"images": images.numpy()})[0]), expected)


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_file_takes_batches_of_any_size(session: Any, batch_size: int) -> None:
    images = np.zeros((batch_size, 1, 8, 8), np.uint8)
    assert session.run(["logits"], {"images": images})[0].shape == (batch_size, 10)


def test_file_takes_raw_uint8_pixels(session: Any) -> None:
    assert session.get_inputs()[0].type == "tensor(uint8)"


def test_file_holds_no_path_of_this_machine(trained: SimpleNamespace) -> None:
    content = (trained.folder / "export" / "model.onnx").read_bytes()
    paths = (str(PACKAGE), str(Path.cwd()), sys.prefix, str(Path.home()), "site-packages", ".py")
    assert [path for path in paths if path.encode() in content] == []


def test_file_holds_its_own_weights(trained: SimpleNamespace) -> None:
    model = onnx.load(trained.folder / "export" / "model.onnx", load_external_data=False)
    assert {item.data_location for item in model.graph.initializer} == {onnx.TensorProto.DEFAULT}


def test_file_holds_no_operation_of_training(trained: SimpleNamespace) -> None:
    model = onnx.load(trained.folder / "export" / "model.onnx")
    assert "Dropout" not in {node.op_type for node in model.graph.node}


def test_export_of_an_unchanged_checkpoint_gives_equal_bytes(
    copied: Path, export_again: Callable[..., Path], contract: dict[str, Any]
) -> None:
    assert file_hash(export_again(copied) / "model.onnx") == contract["onnx_sha256"]


# What is refused


def test_weights_that_are_nan_are_refused(task: ClassificationTask) -> None:
    task.network.head[1].weight.data[0, 0] = math.nan
    with pytest.raises(
        UserError, match="Nothing is exported: NaN or infinity in 1 tensors, the first is head.1.weight"
    ):
        freeze(task.network)


def test_statistics_that_are_infinite_are_refused(task: ClassificationTask) -> None:
    task.network.features[0][1].running_var.fill_(math.inf)
    with pytest.raises(UserError, match="the first is features.0.1.running_var"):
        freeze(task.network)


def test_dropout_that_is_left_in_the_graph_is_refused(verify_network: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(UserError, match=r"The exported graph holds \['Dropout'\], which belong to training"):
        verify_network(AlwaysDropping())


def test_network_that_loses_the_batch_axis_of_a_single_image_is_refused(
    verify_network: Callable[[nn.Module], Any],
) -> None:
    with pytest.raises(UserError, match="ONNX"):
        verify_network(Squeezing())


def test_network_that_gives_one_row_for_the_whole_batch_is_refused(verify_network: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(UserError, match=r"a batch of 2 gives float32 \(1, 10\).*expected float32 \(2, K\)"):
        verify_network(Averaging())


def test_network_with_half_precision_logits_is_refused(verify_network: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(UserError, match="float16.*expected float32"):
        verify_network(Half())


def test_export_refuses_a_model_that_differs(trained: SimpleNamespace, digits: DataModule) -> None:
    task = ClassificationTask.load_from_checkpoint(trained.best, map_location="cpu", weights_only=True).eval()
    frozen = freeze(task.network)
    frozen.head[1].bias.data[3] += 0.01
    with pytest.raises(UserError, match="logits of a batch of 1 differ from PyTorch's by up to 0.01, allowed is"):
        verify(task, frozen, trained.folder / "export" / "model.onnx", digits.splits["val"], TOLERANCE)


def test_difference_on_one_validation_image_alone_is_refused(
    task: ClassificationTask, digits: DataModule, tmp_path: Path
) -> None:
    network, val = Flat(), digits.splits["val"]
    write_onnx(freeze(network), digits.input_spec, tmp_path / "model.onnx")
    val.images[val.rows[200]] = 0  # no random image is black
    network.__class__ = OtherOnBlack
    with pytest.raises(UserError, match="logits of a batch of 230 differ from PyTorch's by up to 1, allowed is"):
        verify(task, freeze(network), tmp_path / "model.onnx", val, TOLERANCE)


def test_difference_in_a_metric_is_refused_whatever_the_tolerance(trained: SimpleNamespace, digits: DataModule) -> None:
    task = ClassificationTask.load_from_checkpoint(trained.best, map_location="cpu", weights_only=True).eval()
    frozen = freeze(task.network)
    frozen.head[1].bias.data[3] += 5
    with pytest.raises(UserError, match="val_[a-z0-9]+ is .* through ONNX, .* in PyTorch"):
        verify(task, frozen, trained.folder / "export" / "model.onnx", digits.splits["val"], {"rtol": 0.0, "atol": 9.0})


def test_metrics_through_onnx_are_those_of_the_checkpoint(contract: dict[str, Any], trained: SimpleNamespace) -> None:
    metrics = json.loads((trained.folder / "metrics.json").read_text())
    expected = {name: value for name, value in metrics.items() if name.startswith("val_")}
    assert contract["parity"]["metrics"] == pytest.approx(expected, rel=1e-4)


def test_failed_export_leaves_the_earlier_one_in_place(
    copied: Path, export_again: Callable[..., Path], contract: dict[str, Any]
) -> None:
    path = copied / "checkpoints" / "best.ckpt"
    content = torch.load(path, weights_only=True)
    content["state_dict"]["network.head.1.bias"][0] = math.nan
    torch.save(content, path)
    with pytest.raises(UserError, match="Nothing is exported"):
        export_again(copied)
    assert file_hash(copied / "export" / "model.onnx") == contract["onnx_sha256"]


def test_export_that_is_not_equal_leaves_nothing_behind(copied: Path, export_again: Callable[..., Path]) -> None:
    before = sorted(path.name for path in copied.rglob("*"))
    with pytest.raises(UserError, match="differ from PyTorch's"):
        export_again(copied, rtol=0.0, atol=-1.0)  # a tolerance that nothing meets
    assert sorted(path.name for path in copied.rglob("*")) == before


# What is said of it


def test_contract_has_the_hashes_of_its_files(contract: dict[str, Any], trained: SimpleNamespace) -> None:
    files = (trained.folder / "export" / "model.onnx", trained.best)
    assert [contract[key] for key in ("onnx_sha256", "checkpoint_sha256")] == [file_hash(path) for path in files]


def test_contract_has_the_hashes_of_its_data(contract: dict[str, Any], digits: DataModule) -> None:
    assert {key: contract[key] for key in ("data_hash", "split_hash")} == digits.fingerprint


def test_contract_names_the_classes_in_the_order_of_the_logits(contract: dict[str, Any], digits: DataModule) -> None:
    assert contract["classes"] == digits.classes


def test_contract_describes_inputs_and_outputs_as_the_file_has_them(contract: dict[str, Any], session: Any) -> None:
    described = [(contract[key]["name"], contract[key]["shape"]) for key in ("input", "output")]
    assert described == [(item.name, item.shape) for item in (session.get_inputs()[0], session.get_outputs()[0])]


def test_contract_says_how_images_are_prepared(contract: dict[str, Any]) -> None:
    assert contract["input"]["preprocessing"].endswith("central 8x8 are taken; uint8, channels first")


def test_contract_has_all_its_fields(contract: dict[str, Any]) -> None:
    fields = {"version", "task", "input", "output", "classes", "parity", "latency", "data_hash", "split_hash"}
    assert contract.keys() == fields | {"checkpoint_sha256", "onnx_sha256", "versions"}


def test_parity_covers_every_validation_sample(contract: dict[str, Any]) -> None:
    assert contract["parity"]["val_samples"] == 230


def test_class_names_of_any_language_stay_readable(copied: Path, export_again: Callable[..., Path]) -> None:
    path = copied / "checkpoints" / "best.ckpt"
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"]["classes"][0] = "zéro"
    torch.save(content, path)
    assert "zéro" in (export_again(copied) / "contract.json").read_text("utf-8")


def test_latency_has_a_row_for_each_batch_size(contract: dict[str, Any], recipe: dict[str, Any]) -> None:
    assert [row["batch_size"] for row in contract["latency"]] == recipe["onnx"]["batch_sizes"]


def test_latency_is_measured_on_at_least_30_runs(contract: dict[str, Any]) -> None:
    assert all(row["repeats"] >= 30 and 0 < row["p50_ms"] <= row["p99_ms"] for row in contract["latency"])


def test_peak_memory_is_that_of_a_fresh_process(contract: dict[str, Any]) -> None:
    assert all(10 < row["peak_memory_mb"] < 250 for row in contract["latency"])  # this process, with torch, has more


def test_number_of_threads_is_that_of_the_option(trained: SimpleNamespace) -> None:
    row = measure(str(trained.folder / "export" / "model.onnx"), batch_size=2, num_threads=2, seconds=0)
    assert (row["batch_size"], row["num_threads"], row["repeats"]) == (2, 2, 1)


def test_no_batch_size_means_no_measurement(trained: SimpleNamespace) -> None:
    assert measure_latency(trained.folder / "export" / "model.onnx", [], 1, seconds=0) == []


@pytest.mark.parametrize(("batch_size", "num_threads"), [(0, 1), (1, -3)])
def test_measurement_that_can_not_be_made_is_refused(
    trained: SimpleNamespace, batch_size: int, num_threads: int
) -> None:
    with pytest.raises(UserError, match=r"expected at least 1 of each. Change onnx.batch_sizes or onnx.num_threads"):
        measure_latency(trained.folder / "export" / "model.onnx", [batch_size], num_threads, seconds=0)


def test_measurement_is_tried_out_before_training(
    task: ClassificationTask, digits: DataModule, make_trainer: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match="Latency can't be measured"):
        OnnxExport(batch_sizes=[0]).rehearse(make_trainer(), task, digits)


def test_summary_without_measurement_says_the_rest(copied: Path) -> None:
    path = copied / "export" / "contract.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "latency": []}))
    assert export_summary(copied / "checkpoints" / "best.ckpt")[1].endswith("validation samples")


def test_summary_names_file_equality_and_latency(trained: SimpleNamespace) -> None:
    text = "\n".join(export_summary(trained.best))
    assert all(part in text for part in ("model.onnx", "equal to PyTorch within", "230 validation", "batch 1: p50"))


def test_summary_of_a_run_without_export_is_empty(tmp_path: Path) -> None:
    assert export_summary(tmp_path / "checkpoints" / "best.ckpt") == []


# The inputs it is tried on


def test_random_inputs_are_the_same_at_every_call(digits: DataModule) -> None:
    assert torch.equal(random_inputs(digits.input_spec, 3), random_inputs(digits.input_spec, 3))


def test_random_inputs_span_the_whole_range_of_uint8(digits: DataModule) -> None:
    inputs = random_inputs(digits.input_spec, 100)
    assert (inputs.dtype, inputs.min().item(), inputs.max().item()) == (torch.uint8, 0, 255)


def test_random_inputs_of_float_are_standard_normal() -> None:
    inputs = random_inputs({"shape": [1, 64, 64], "dtype": "float32"}, 8)
    assert (inputs.mean().item(), inputs.std().item()) == pytest.approx((0, 1), abs=0.02)


def test_freezing_leaves_the_network_as_it_is(task: ClassificationTask) -> None:
    task.network.train()
    freeze(task.network)
    assert (task.network.training, next(task.network.parameters()).requires_grad) == (True, True)
