"""MLflow tracking: the store, and for each training a run with its curves, its hyperparameters and its facts."""

import getpass
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from filelock import FileLock
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from . import PACKAGE, ROOT, UserError
from .images import replace_file

# Read by mlflow when it is first imported. No usage statistics leave the machine, and a server that is away is reported
# within seconds instead of after minutes of retries.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")


def embedded_store() -> str:
    """URI of the project's own store, `mlflow.db`. Made once: in a file aside, under a lock, and then renamed, because
    MLflow builds its tables without a lock, and two processes or a kill in the middle would spoil them for good."""
    from mlflow import MlflowClient

    path = ROOT / "mlflow.db"
    with FileLock(ROOT / ".mlflow.db.lock"):
        if not path.is_file():
            part = ROOT / ".mlflow.db.part"
            part.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{part}").search_experiments()
            part.replace(path)
    return f"sqlite:///{path}"


def command_output(*command: str) -> str:
    """What a program prints, or `none` where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def run_facts() -> dict[str, str]:
    """Code state and versions, as tags: git commit and dirty flag, Python, torch, CUDA, driver, device, command line."""
    cuda = torch.cuda.is_available()
    git = ("git", "-C", str(ROOT))
    commit = command_output(*git, "rev-parse", "HEAD")
    return {
        "git_commit": commit,
        "git_dirty": "unknown" if commit == "none" else str(bool(command_output(*git, "status", "--porcelain"))),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "lightning_version": L.__version__,
        "cuda_version": torch.version.cuda or "none",
        "cudnn_version": str(torch.backends.cudnn.version()) if cuda else "none",
        "driver_version": command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else "none",
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "command": shlex.join(sys.argv),
    }


class MLflowRun(Logger):
    """Lightning logger that writes to one MLflow run, in batches, and can go on with the run of an earlier process.

    Args:
        experiment_name: MLflow experiment that collects the runs; by default the package's name.
        tracking_uri: Where to log; by default MLFLOW_TRACKING_URI, else `mlflow.db` in the project.
    """

    def __init__(self, experiment_name: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__()
        self.experiment_name = experiment_name or PACKAGE.name
        self.tracking_uri = tracking_uri
        self.folder: Path | None = None  # the run's folder, where the MLflow run's id is kept for a resume
        self.keep_open = False  # whether more will be recorded after training, before the run counts as finished
        self._client: Any = None
        self._run_id = ""
        self._pending: list[Any] = []
        self._last_flush = time.monotonic()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The MlflowClient; at first use, connects and creates the run or takes up the one noted in the run's folder.

        Raises:
            UserError: The store does not answer or refuses.
        """
        if self._client is None:
            import mlflow

            uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or embedded_store()
            mlflow.set_tracking_uri(uri)
            client = mlflow.MlflowClient(uri)
            note = self.folder / "mlflow.json" if self.folder else None
            try:
                if note and note.is_file():
                    self._run_id = json.loads(note.read_text())["run_id"]
                    client.update_run(self._run_id, "RUNNING")
                else:
                    self._run_id = self._create_run(client, uri)
            except mlflow.MlflowException as error:
                reason = str(error).splitlines()[0][:300]
                raise UserError(
                    f"MLflow at {uri.split('@')[-1]} can't be used: {reason} Start the server, or unset "
                    "MLFLOW_TRACKING_URI to use the project's own store, or train with --trainer.logger false."
                ) from error
            if note:
                replace_file(note, json.dumps({"run_id": self._run_id}).encode())
            self._client = client
        return self._client

    def _create_run(self, client: Any, uri: str) -> str:
        # Absolute, so that artifacts land in the project from any working directory; a server decides for itself.
        location = (ROOT / "mlruns").as_uri() if uri.startswith("sqlite:") else None
        with FileLock(ROOT / ".mlflow.db.lock"):  # two first runs would both create the experiment
            experiment = client.get_experiment_by_name(self.experiment_name)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else client.create_experiment(self.experiment_name, artifact_location=location)
            )
        tags = {"mlflow.user": getpass.getuser(), "mlflow.source.name": PACKAGE.name, "mlflow.source.type": "LOCAL"}
        name = self.folder.name if self.folder else None
        return str(client.create_run(experiment_id, run_name=name, tags=tags).info.run_id)

    @property
    def name(self) -> str:
        return self.experiment_name

    @property
    def version(self) -> str:
        """The MLflow run's id; empty before the first use, and on other ranks than 0."""
        return self._run_id

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        client = self.experiment
        client.log_batch(self._run_id, tags=[RunTag(key, str(value)[:5000]) for key, value in tags.items()])

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log as MLflow params. A param never changes: what a resumed run sets anew is kept as a tag `resumed.*`."""
        from mlflow.entities import Param

        client = self.experiment
        known = client.get_run(self._run_id).data.params
        values = {key: str(value)[:6000] for key, value in dict(params).items() if not key.startswith("_")}
        client.log_batch(self._run_id, params=[Param(*item) for item in values.items() if item[0] not in known])
        changed = {f"resumed.{key}": value for key, value in values.items() if known.get(key, value) != value}
        self.log_tags(changed)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Collect; sent every 5 seconds in one call, which costs the store as much as a single point would."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._pending += [Metric(key, float(value), now, step or 0) for key, value in metrics.items()]
        if time.monotonic() - self._last_flush > 5:
            self.flush()

    def flush(self) -> None:
        """Send what is collected; the store takes at most 1,000 points in a call."""
        client = self.experiment
        while self._pending:
            client.log_batch(self._run_id, metrics=self._pending[:1000])
            del self._pending[:1000]
        self._last_flush = time.monotonic()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Called by the Trainer at the end of each of its loops, with `success` or `failed`."""
        if self._client is None:
            return
        self.flush()
        if status == "success" and self.keep_open:
            return
        stopped = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SIGTERMException))
        end = "FINISHED" if status == "success" else "KILLED" if stopped else "FAILED"
        self._client.set_terminated(self._run_id, end)
