"""Does the exported file compute what PyTorch computes? Compared in shape, dtype, values and metrics."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn

from . import UserError
from .metrics import scalars


def random_inputs(input_spec: dict[str, Any], batch_size: int) -> Tensor:
    """Inputs of the given spec, the same at every call: uint8 over the whole range, floats standard normal."""
    generator = torch.Generator().manual_seed(batch_size)
    shape = (batch_size, *input_spec["shape"])
    if input_spec["dtype"] == "uint8":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator)


def compare(session: Any, frozen: nn.Module, inputs: Tensor, tolerance: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Logits of a batch by ONNX Runtime and by PyTorch, both (B, K) float32.

    Raises:
        UserError: Shape, dtype or a value differs.
    """
    with torch.no_grad():
        expected = frozen(inputs).numpy()
    (logits,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    float32 = {logits.dtype, expected.dtype} == {np.dtype(np.float32)}
    if logits.shape != expected.shape or not float32 or logits.ndim < 2 or len(logits) != len(inputs):
        raise UserError(
            f"ONNX export: a batch of {len(inputs)} gives {logits.dtype} {logits.shape}, in PyTorch {expected.dtype} "
            f"{expected.shape}; expected float32 ({len(inputs)}, K) from both. See forward in model.py."
        )
    if not np.allclose(logits, expected, **tolerance, equal_nan=False):
        raise UserError(
            f"ONNX export: logits of a batch of {len(inputs)} differ from PyTorch's by up to "
            f"{np.abs(logits - expected).max():.3g}, allowed is {tolerance}. Nothing is exported; the checkpoint stays."
        )
    return torch.from_numpy(logits), torch.from_numpy(expected)


def verify(task: Any, frozen: nn.Module, path: Path, val_split: Any, tolerance: dict[str, float]) -> dict[str, Any]:
    """Prove that the file computes what PyTorch does: on random batches of several sizes, on every validation sample,
    and in the validation metrics.

    Raises:
        UserError: Something differs; says what and by how much.
    """
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    sizes = [1, 2, 3, 8, 17]
    pairs = [compare(session, frozen, random_inputs(task.hparams["input_spec"], size), tolerance) for size in sizes]
    onnx_metrics, torch_metrics = task.make_metrics("val"), task.make_metrics("val")
    for metric in [*onnx_metrics.values(), *torch_metrics.values()]:
        metric.distributed_available_fn = bool  # False: under DDP one process verifies, and must not wait for others
    for start in range(0, len(val_split), 256):  # the whole split on this process, whatever the number of devices
        inputs, targets = val_split.__getitems__(list(range(start, min(start + 256, len(val_split)))))
        pairs.append(compare(session, frozen, inputs, tolerance))
        task.measure(onnx_metrics, pairs[-1][0], targets)
        task.measure(torch_metrics, pairs[-1][1], targets)
    metrics = {name: float(value) for name, value in scalars(onnx_metrics.compute()).items()}
    for name, value in scalars(torch_metrics.compute()).items():
        if not math.isclose(metrics[name], float(value), rel_tol=1e-3, abs_tol=1e-3):
            raise UserError(f"ONNX export: {name} is {metrics[name]:.6g} through ONNX, {float(value):.6g} in PyTorch.")
    difference = max(float((logits - expected).abs().max()) for logits, expected in pairs)
    samples = {"batch_sizes": sizes, "val_samples": len(val_split)}
    return {"max_abs_difference": difference, **tolerance, **samples, "metrics": metrics}
