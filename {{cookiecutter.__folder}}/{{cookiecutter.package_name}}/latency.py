"""How long one ONNX file takes at one batch size, and how much memory: a script of its own, without torch.

    python latency.py model.onnx --batch_size 8 --num_threads 1

One process measures one batch size, so that the peak memory of one can't hide in the peak of another.
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
    if status.is_file():  # on Linux, ru_maxrss is inherited from the process that started this one
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def measure(path: str, batch_size: int, num_threads: int, seconds: float) -> dict[str, float]:
    """Run the model on random inputs for some seconds, at least 30 times, after 5 runs that do not count; for 0 seconds
    once, to see that it runs."""
    unmeasured, least = (5, 30) if seconds else (0, 1)
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    spec = session.get_inputs()[0]
    dtype = np.uint8 if spec.type == "tensor(uint8)" else np.float32
    inputs = np.random.default_rng(0).integers(0, 256, (batch_size, *spec.shape[1:])).astype(dtype)
    ends = [time.perf_counter()]
    while len(ends) <= unmeasured + least or ends[-1] < ends[0] + seconds:
        session.run(None, {spec.name: inputs})
        ends.append(time.perf_counter())
    p50, p99 = np.percentile(np.diff(ends)[unmeasured:], [50, 99]) * 1000
    size = {"batch_size": batch_size, "num_threads": num_threads, "repeats": len(ends) - 1 - unmeasured}
    return {**size, "p50_ms": round(p50, 4), "p99_ms": round(p99, 4), "peak_memory_mb": round(peak_memory_mb(), 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    if options.batch_size < 1 or options.num_threads < 1:
        parser.error(f"batch size {options.batch_size} and {options.num_threads} threads: expected at least 1 of each")
    print(json.dumps(measure(**vars(options))))
