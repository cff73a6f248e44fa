"""From a checkpoint to one ONNX file and its serving contract, proven equal to PyTorch and measured."""

import copy
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import Subset

from . import PACKAGE, UserError
from .images import file_hash
from .parity import random_inputs, verify
from .runs import run_folder

# Operations that only training has; whether ONNX Runtime carries them out depends on its optimisation level.
TRAINING_ONLY = {"Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"}

ACTIVATIONS = {"multiclass": "softmax", "multilabel": "sigmoid"}


def freeze(network: nn.Module) -> nn.Module:
    """An independent float32 copy on the CPU, in eval mode; the network itself is left as it is.

    Raises:
        UserError: A weight is NaN or infinite.
    """
    frozen = copy.deepcopy(network).to("cpu", torch.float32).eval().requires_grad_(False)
    if bad := [name for name, tensor in frozen.state_dict().items() if not torch.isfinite(tensor).all()]:
        raise UserError(f"Nothing is exported: NaN or infinity in {len(bad)} tensors, the first is {bad[0]}.")
    return frozen


def write_onnx(frozen: nn.Module, input_spec: dict[str, Any], path: Path) -> None:
    """One self-contained file with a free batch size, checked, and free of this machine's paths.

    Raises:
        UserError: The network can't be exported, or an operation of training is left in the graph.
    """
    import onnx  # here and not above: training does not need it

    try:
        with warnings.catch_warnings(), torch.autocast("cpu", enabled=False):
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
        assert program is not None
        model = program.model_proto
        for item in [*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output]:
            del item.metadata_props[:]  # stack traces with absolute paths of this machine
        onnx.save(model, path)
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the exporter has many kinds; the first line says what, the chained one where
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"The network can't be exported to ONNX: {reason}. Change its forward in model.py.") from error
    if left := sorted({node.op_type for node in model.graph.node} & TRAINING_ONLY):
        raise UserError(f"The exported graph holds {left}, which belong to training. See eval mode in model.py.")


def measure_latency(path: Path, batch_sizes: list[int], num_threads: int, seconds: float) -> list[dict[str, float]]:
    """Latency and peak memory at each batch size, each in a fresh process.

    Raises:
        UserError: One can't be measured; passes on what the process said last.
    """
    options = [f"--num_threads={num_threads}", f"--seconds={seconds}"]
    command = [sys.executable, str(PACKAGE / "latency.py"), str(path), *options]
    rows = []
    for size in batch_sizes:
        run = subprocess.run([*command, f"--batch_size={size}"], capture_output=True, text=True)
        if run.returncode:
            reason = (run.stderr.strip() or f"exit code {run.returncode}, perhaps out of memory").splitlines()[-1]
            raise UserError(f"Latency can't be measured: {reason}. Change onnx.batch_sizes or onnx.num_threads.")
        rows.append(json.loads(run.stdout))
    return rows


class OnnxExport(Callback):
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
        batch_sizes: list[int] = [1, 8, 32],  # noqa: B006 - never changed, and --help shows it
        num_threads: int = 1,
        rtol: float = 1e-3,
        atol: float = 1e-4,
    ) -> None:
        self.enabled, self.batch_sizes, self.num_threads = enabled, batch_sizes, num_threads
        self.tolerance = {"rtol": rtol, "atol": atol}

    def rehearse(self, trainer: Trainer, task: Any, datamodule: LightningDataModule) -> str:
        """Export the untrained network and prove it equal, in a folder that is thrown away."""
        if not self.enabled:
            return "export off"
        frozen = freeze(task.network)
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "model.onnx"
            write_onnx(frozen, task.hparams["input_spec"], path)
            val = datamodule.splits["val"]
            parity = verify(task, frozen, path, Subset(val, range(min(64, len(val)))), self.tolerance)
            measure_latency(path, self.batch_sizes, self.num_threads, seconds=0)
        return f"export of the untrained network: equal to PyTorch within {parity['max_abs_difference']:.1g}"

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if self.enabled and best and trainer.is_global_zero:
            for left in run_folder(best).glob(".export-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            self.run(type(pl_module), trainer.datamodule, Path(best))

    def run(self, task_class: type[LightningModule], datamodule: LightningDataModule, checkpoint: Path) -> None:
        """Export, prove, measure; only then do the files take the place of an earlier export."""
        task: Any = task_class.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True).eval()
        frozen, spec, classes = freeze(task.network), task.hparams["input_spec"], task.hparams["classes"]
        folder = run_folder(checkpoint) / "export"
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as name:
            part = Path(name) / "export"
            part.mkdir()
            path = part / "model.onnx"
            write_onnx(frozen, spec, path)
            contract = {
                "version": 1,
                "task": datamodule.task,
                "input": {**spec, "shape": ["batch", *spec["shape"]], "normalization": "inside the graph"},
                "output": {
                    "name": "logits",
                    "shape": ["batch", len(classes)],
                    "dtype": "float32",
                    "activation": ACTIVATIONS.get(datamodule.task, "none"),  # to probabilities
                },
                "classes": classes,
                "parity": verify(task, frozen, path, datamodule.splits["val"], self.tolerance),
                "latency": measure_latency(path, self.batch_sizes, self.num_threads, seconds=1),
                **task.hparams["fingerprint"],
                "checkpoint_sha256": file_hash(checkpoint),
                "onnx_sha256": file_hash(path),
                "versions": {name: importlib.metadata.version(name) for name in ("torch", "onnx", "onnxruntime")},
            }
            (part / "contract.json").write_text(json.dumps(contract, indent=2, ensure_ascii=False) + "\n", "utf-8")
            if folder.exists():
                os.replace(folder, Path(name) / "previous")
            os.replace(part, folder)


def export_summary(checkpoint: Path) -> list[str]:
    """Two lines on the export beside a checkpoint; none where there is none."""
    path = run_folder(checkpoint) / "export" / "contract.json"
    if not path.is_file():
        return []
    contract = json.loads(path.read_text("utf-8"))
    difference, samples = contract["parity"]["max_abs_difference"], contract["parity"]["val_samples"]
    equal = f"equal to PyTorch within {difference:.1g} on {samples:,} validation samples"
    for row in contract["latency"][:1]:
        equal += f"; batch {row['batch_size']}: p50 {row['p50_ms']:.3g} ms, peak {row['peak_memory_mb']:.0f} MiB"
    return [f"exported         {os.path.relpath(path.parent)}/model.onnx", f"                 {equal}"]


def export(
    trainer: Trainer, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None
) -> None:
    """Export a checkpoint to ONNX, prove the export equal to PyTorch, and measure it.

    Args:
        ckpt_path: The checkpoint; by default the best one of the newest run.
    """
    assert ckpt_path is not None  # the command line fills it in
    datamodule.setup("validate")
    callback = next(callback for callback in trainer.callbacks if isinstance(callback, OnnxExport))
    callback.run(type(model), datamodule, Path(ckpt_path))
    print("\n".join(export_summary(Path(ckpt_path))))
