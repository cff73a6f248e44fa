"""From a checkpoint to one ONNX file and its serving contract, proven equal to PyTorch and measured."""

import contextlib
import copy
import importlib.metadata
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from . import PACKAGE, UserError
from .images import file_hash

# Nodes that only training has; ONNX Runtime drops or keeps them depending on its optimisation level.
TRAINING_ONLY = {"Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"}


def freeze(network: nn.Module) -> nn.Module:
    """An independent float32 copy on the CPU, in eval mode; the network itself is left as it is.

    Raises:
        UserError: A weight is NaN or infinite.
    """
    frozen = copy.deepcopy(network).to("cpu", torch.float32).eval().requires_grad_(False)
    bad = [name for name, tensor in frozen.state_dict().items() if not torch.isfinite(tensor).all()]
    if bad:
        raise UserError(f"Nothing is exported: {bad[0]} and {len(bad) - 1} more tensors hold NaN or infinity.")
    return frozen


def random_inputs(input_spec: dict[str, Any], batch_size: int) -> Tensor:
    """Inputs of the given spec, the same at every call: uint8 over the whole range, floats standard normal."""
    generator = torch.Generator().manual_seed(batch_size)
    shape = (batch_size, *input_spec["shape"])
    if input_spec["dtype"] == "uint8":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator)


def write_onnx(frozen: nn.Module, input_spec: dict[str, Any], path: Path) -> None:
    """One self-contained file with a free batch size, checked, and free of this machine's paths.

    Raises:
        UserError: The network can't be exported, or a training-only operation is left in the graph.
    """
    import onnx  # here and not above: `--help` and training don't need it

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.autocast("cpu", enabled=False):
            warnings.simplefilter("ignore")  # the exporter's own deprecations, which no user can mend
            program = torch.onnx.export(
                frozen,
                (random_inputs(input_spec, 2),),
                dynamo=True,
                verbose=False,
                input_names=[input_spec["name"]],
                output_names=["logits"],
                dynamic_shapes=({0: "batch"},),
            )
    except Exception as error:  # the exporter has many kinds; the first line says what, the chained one where
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"The network can't be exported to ONNX: {reason}. Change its forward in model.py.") from error
    assert program is not None
    model = program.model_proto
    for item in [*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output]:
        del item.metadata_props[:]  # stack traces with absolute paths of this machine
    left = sorted({node.op_type for node in model.graph.node} & TRAINING_ONLY)
    if left:
        raise UserError(f"The exported graph holds {left}, which act in training alone. Check eval mode in model.py.")
    onnx.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)


def onnx_session(path: Path) -> Any:
    """ONNX Runtime on the CPU for this file: maps a batch of inputs to logits."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def batches(split: Any, batch_size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """A whole split in order, on this process alone, whatever the number of devices."""
    for start in range(0, len(split), batch_size):
        yield split.__getitems__(list(range(start, min(start + batch_size, len(split)))))


def verify(
    task: L.LightningModule, frozen: nn.Module, path: Path, val_split: Any, rtol: float, atol: float
) -> dict[str, Any]:
    """Prove that the file computes what PyTorch computes: on random batches of several sizes, on every validation
    sample, and in the validation metrics.

    Raises:
        UserError: Shape, dtype, a value or a metric differs; says where and by how much.
    """
    session = onnx_session(path)
    input_spec, num_classes = task.hparams["input_spec"], len(task.hparams["classes"])
    largest = 0.0

    def compare(inputs: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal largest
        with torch.no_grad():
            expected = frozen(inputs).numpy()
        logits = session.run(None, {input_spec["name"]: inputs.numpy()})[0]
        # Against the declared shape too: a squeeze() in the network loses the batch axis on both sides alike.
        if logits.shape != (len(inputs), num_classes) or logits.shape != expected.shape or logits.dtype != np.float32:
            raise UserError(
                f"ONNX export: for a batch of {len(inputs)}, ONNX Runtime gives {logits.dtype} {logits.shape}, PyTorch "
                f"{expected.dtype} {expected.shape}; expected float32 {(len(inputs), num_classes)}. See model.py."
            )
        difference = float(np.abs(logits - expected).max())
        if not np.allclose(logits, expected, rtol=rtol, atol=atol, equal_nan=False):
            raise UserError(
                f"ONNX export: logits of a batch of {len(inputs)} differ from PyTorch's by up to {difference:.3g} "
                f"(allowed: rtol {rtol:g}, atol {atol:g}). The checkpoint is kept, nothing is exported."
            )
        largest = max(largest, difference)
        return torch.from_numpy(logits), torch.from_numpy(expected)

    sizes = [1, 2, 3, 8, 17]
    for size in sizes:
        compare(random_inputs(input_spec, size))
    onnx_metrics, torch_metrics = task.make_metrics("val"), task.make_metrics("val")
    for inputs, targets in batches(val_split):
        logits, expected = compare(inputs)
        task.measure(onnx_metrics, logits, targets)
        task.measure(torch_metrics, expected, targets)
    through_onnx = {name: float(value) for name, value in onnx_metrics.compute().items()}
    for name, value in torch_metrics.compute().items():
        if not math.isclose(through_onnx[name], float(value), rel_tol=1e-3, abs_tol=1e-3):
            raise UserError(
                f"ONNX export: {name} is {through_onnx[name]:.6g} through ONNX, {float(value):.6g} in PyTorch."
            )
    return {
        "max_abs_difference": largest,
        "rtol": rtol,
        "atol": atol,
        "batch_sizes": sizes,
        "val_samples": len(val_split),
        "metrics": through_onnx,
    }


def measure_latency(path: Path, batch_sizes: list[int], num_threads: int) -> list[dict[str, float]]:
    """Latency and peak memory at each batch size, each in a fresh process."""
    script = [sys.executable, str(PACKAGE / "latency.py"), str(path), "--num_threads", str(num_threads)]
    runs = [
        subprocess.run([*script, "--batch_size", str(size)], check=True, capture_output=True) for size in batch_sizes
    ]
    return [json.loads(run.stdout) for run in runs]


def make_contract(task: L.LightningModule, checkpoint: Path, onnx_path: Path) -> dict[str, Any]:
    """What a server has to know to use the file: schema of inputs and outputs, class names, and where it came from."""
    input_spec = task.hparams["input_spec"]
    names = ("torch", "lightning", "onnx", "onnxruntime", "numpy")
    return {
        "version": 1,
        "task": "multiclass",
        "input": {**input_spec, "shape": ["batch", *input_spec["shape"]], "normalization": "inside the graph"},
        "output": {"name": "logits", "shape": ["batch", len(task.hparams["classes"])], "dtype": "float32"},
        "classes": task.hparams["classes"],
        "checkpoint_sha256": file_hash(checkpoint),
        "onnx_sha256": file_hash(onnx_path),
        **task.hparams["fingerprint"],
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


class OnnxExport(L.Callback):
    """When training ends, exports the best checkpoint to `export/model.onnx` and `export/contract.json` of its run.

    Args:
        enabled: Whether `fit` exports; the `export` command always does.
        batch_sizes: Batch sizes at which latency and memory are measured: those that production will use.
        num_threads: Threads of ONNX Runtime in that measurement.
        rtol: Allowed relative difference of a logit from PyTorch's, both in float32.
        atol: Allowed absolute difference of a logit.
    """

    def __init__(
        self,
        enabled: bool = True,
        batch_sizes: list[int] = [1, 8, 32],  # noqa: B006 - never changed; jsonargparse shows it in --help
        num_threads: int = 1,
        rtol: float = 1e-3,
        atol: float = 1e-4,
    ) -> None:
        self.enabled, self.batch_sizes, self.num_threads = enabled, batch_sizes, num_threads
        self.rtol, self.atol = rtol, atol

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if not (self.enabled and best and trainer.is_global_zero):
            return
        task = type(pl_module).load_from_checkpoint(best, map_location="cpu", weights_only=True)
        self.run(task, trainer.datamodule, Path(best))

    def rehearse(self, task: L.LightningModule, datamodule: L.LightningDataModule) -> str:
        """Export the untrained network and prove it equal, in a folder that is thrown away."""
        if not self.enabled:
            return "export  off"
        frozen = freeze(task.network)
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "model.onnx"
            write_onnx(frozen, task.hparams["input_spec"], path)
            parity = verify(task, frozen, path, datamodule.splits["val"], self.rtol, self.atol)
        return f"export  rehearsed with the untrained network: equal within {parity['max_abs_difference']:.1g}"

    def run(self, task: L.LightningModule, datamodule: L.LightningDataModule, checkpoint: Path) -> Path:
        """Export, prove, measure; only then do the files take the place of an earlier export.

        Args:
            task: The checkpoint's task, in any mode.
            datamodule: Set up for the data that it was trained on.
            checkpoint: The file itself; the export lands beside its folder.
        """
        task = task.eval()
        frozen = freeze(task.network)
        folder = checkpoint.parent.parent / "export"
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as name:
            part = Path(name) / "export"
            part.mkdir()
            write_onnx(frozen, task.hparams["input_spec"], part / "model.onnx")
            parity = verify(task, frozen, part / "model.onnx", datamodule.splits["val"], self.rtol, self.atol)
            contract = make_contract(task, checkpoint, part / "model.onnx")
            contract["parity"] = parity
            contract["latency"] = measure_latency(part / "model.onnx", self.batch_sizes, self.num_threads)
            (part / "contract.json").write_text(json.dumps(contract, indent=2, ensure_ascii=False) + "\n", "utf-8")
            if folder.exists():
                os.replace(folder, Path(name) / "previous")
            os.replace(part, folder)
        return folder


def export_summary(checkpoint: Path) -> list[str]:
    """One line on the export beside a checkpoint, or none where there is none."""
    path = checkpoint.parent.parent / "export" / "contract.json"
    if not path.is_file():
        return []
    contract = json.loads(path.read_text("utf-8"))
    parity, first = contract["parity"], contract["latency"][0]
    return [
        f"export           {os.path.relpath(path.with_name('model.onnx'))}, contract.json beside it",
        f"                 equal to PyTorch within {parity['max_abs_difference']:.1g} on {parity['val_samples']} validation "
        f"samples; batch {first['batch_size']}: p50 {first['p50_ms']:.3g} ms, {first['peak_memory_mb']:.0f} MiB",
    ]


def export(
    trainer: L.Trainer, model: L.LightningModule, datamodule: L.LightningDataModule, ckpt_path: str | None = None
) -> None:
    """Export a checkpoint to ONNX, prove the export equal to PyTorch, and measure it.

    Args:
        ckpt_path: The checkpoint; by default the best one of the newest run.
    """
    assert ckpt_path is not None  # the command line fills it in
    callback = next(callback for callback in trainer.callbacks if isinstance(callback, OnnxExport))
    datamodule.setup("validate")
    task = type(model).load_from_checkpoint(ckpt_path, map_location="cpu", weights_only=True)
    print(f"Exported and proven: {callback.run(task, datamodule, Path(ckpt_path))}")
