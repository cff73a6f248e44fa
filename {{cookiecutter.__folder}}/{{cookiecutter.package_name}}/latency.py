"""How long and how much memory one ONNX file takes at one batch size: a script of its own, without torch.

    python latency.py model.onnx --batch_size 8 --num_threads 1

A fresh process for each batch size, so that the peak memory of one can't hide in the peak of another.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux carries ru_maxrss over from the parent; this counter starts with the process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def measure(path: str, batch_size: int, num_threads: int, seconds: float) -> dict[str, float]:
    """Run the model on random inputs for some seconds (at least 30 times), after 5 runs that don't count."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    spec = session.get_inputs()[0]
    dtype = np.uint8 if spec.type == "tensor(uint8)" else np.float32
    inputs = np.random.default_rng(0).integers(0, 256, (batch_size, *spec.shape[1:])).astype(dtype)
    durations: list[float] = []
    for _ in range(5):
        session.run(None, {spec.name: inputs})
    end = time.perf_counter() + seconds
    while len(durations) < 30 or time.perf_counter() < end:
        start = time.perf_counter()
        session.run(None, {spec.name: inputs})
        durations.append(time.perf_counter() - start)
    p50, p99 = np.percentile(durations, [50, 99]) * 1000
    return {
        "batch_size": batch_size,
        "num_threads": num_threads,
        "p50_ms": round(float(p50), 4),
        "p99_ms": round(float(p99), 4),
        "samples_per_s": round(batch_size / float(p50) * 1000, 1),
        "peak_memory_mb": round(peak_memory_mb(), 1),
        "repeats": len(durations),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    print(json.dumps(measure(**vars(parser.parse_args()))))
