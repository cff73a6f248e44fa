"""MLflow tracking: for each training a run with its curves, its hyperparameters, its facts and its files."""

import json
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from . import PACKAGE, store
from .images import replace_file
from .store import StoreAway, StoreError, impatient, plain_errors, without_password

UNSENT, NOTE = "unsent.json", "mlflow_run_id"  # in a run's folder: what the store has not got, and the run's id there
KEPT = f"Until then all is kept in the run's folder; the next run sends it, or: python -m {PACKAGE.name} sync"
RETRY_AFTER = 30.0  # seconds, in which a store that did not answer is left alone


class MLflowRun(MLFlowLogger):
    """Lightning's MLflow logger, with a store of the project's own, and with an outbox: whatever is recorded is sent in
    batches, and what can't be sent is kept in the run's folder, for the next run or `sync`. So a store that is away,
    from the start or later, neither stops training nor holds it up for more than seconds.

    Args:
        experiment_name: MLflow experiment that collects the runs; by default the package's name.
        tracking_uri: Where to log; by default MLFLOW_TRACKING_URI, else `mlflow.db` in the project.
    """

    def __init__(self, experiment_name: str | None = None, tracking_uri: str | None = None) -> None:
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or store.embedded_store()
        # Absolute, so that artifacts land in the project from any working directory; a server decides for itself.
        location = (store.ROOT / "mlruns").as_uri() if uri.startswith("sqlite:") else None
        with plain_errors(uri):
            super().__init__(experiment_name or PACKAGE.name, tracking_uri=uri, artifact_location=location)
        self.keep_open = False  # whether more will be recorded after training, before the run counts as finished
        self.outbox: dict[str, Any] = {"points": [], "params": {}, "tags": {}, "documents": [], "status": None}
        self.outbox |= {"began": int(time.time() * 1000), "ended": None}  # ms since 1970, as MLflow counts
        self.outbox |= {"uri": without_password(uri), "experiment": self._experiment_name, "token": uuid.uuid4().hex}
        self._known: dict[str, int] = {}  # the newest step of each metric that a stopped process had recorded
        self._last_flush, self._retry_at = time.monotonic(), 0.0
        self._error: StoreError | None = None  # the store's last one, until it answers again
        self._folder: Path | None = None
        self._ended = self._connected = False

    @rank_zero_only
    def use_folder(self, folder: Path, ended: bool = False) -> None:
        """Record into the MLflow run that the folder notes, or a new one; with `ended`, only send what is left."""
        self._folder, self._run_name, self._ended = folder, folder.name, ended
        if (folder / UNSENT).is_file():
            self.outbox |= json.loads((folder / UNSENT).read_text())
            self._experiment_name = self.outbox["experiment"]
            for key, _, _, step in self.outbox["points"]:
                self._known[key] = max(step, self._known.get(key, -1))
        if not ended:
            self.outbox["status"] = None
        if (folder / NOTE).is_file():
            self._run_id = (folder / NOTE).read_text()

    @contextmanager
    def asking(self, patient: bool = False) -> Iterator[Any]:
        """The MlflowClient, for calls that training waits for: a store that does not answer is given up after seconds,
        and then left alone for a while. Where nothing waits, be `patient`.

        Raises:
            StoreError: It does not answer (StoreAway), did not a moment ago, or refuses.
        """
        if self._error and not patient and time.monotonic() < self._retry_at:
            raise self._error
        try:
            with nullcontext() if patient else impatient(), plain_errors(self._tracking_uri):
                yield self._mlflow_client
        except StoreAway as error:
            self._retry_at, self._error = time.monotonic() + RETRY_AFTER, error
            raise

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The MlflowClient. The run is made when something is first sent, or `run_id` is asked for."""
        return self._mlflow_client

    @property
    def run_id(self) -> str | None:
        """Connects, as `experiment_id` does, where that is still to be done."""
        self.connect()
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        self.connect()
        return self._experiment_id

    @property
    def version(self) -> str | None:
        """The run's id, once there is one; the progress bar asks for it."""
        return self._run_id

    @rank_zero_only
    def connect(self) -> None:
        """Find or make the experiment and the run. Raises StoreError if the store does not answer or refuses."""
        import mlflow

        client = self._mlflow_client
        if self._connected:
            return
        mlflow.set_tracking_uri(self._tracking_uri)  # for its functions that registration calls
        with plain_errors(self._tracking_uri), store.STORE_LOCK:
            token, began = self.outbox["token"], self.outbox["began"]
            if self._folder and not self._run_id:
                if (self._folder / UNSENT).is_file():  # a process may have been killed just when it had made the run
                    self._run_id = store.find_run(client, token)
                self.keep()
            place = self._experiment_name, self._artifact_location
            self._run_id = run_id = self._run_id or store.make_run(client, *place, self._run_name, token, began)
            run = client.get_run(run_id)
            self._experiment_id = run.info.experiment_id
            if self._folder:
                replace_file(self._folder / NOTE, run_id.encode())
            if not self._ended:
                client.update_run(run_id, "RUNNING")
            for key in run.data.metrics:  # of a run that goes on; a new one has none
                newest = max(point.step for point in client.get_metric_history(run_id, key))
                self.outbox["points"] = [item for item in self.outbox["points"] if item[0] != key or item[3] > newest]
                self._known[key] = max(newest, self._known.get(key, -1))
            self._connected = True

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, Any]) -> None:
        self.outbox["tags"] |= {key: str(value)[:5000] for key, value in tags.items()}

    @rank_zero_only
    def log_documents(self, names: Iterable[str]) -> None:
        self.outbox["documents"] += names

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self.outbox["params"] |= {key: str(value)[:6000] for key, value in dict(params).items() if key[0] != "_"}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Collect, and send every 5 seconds: a call with many points costs the store as much as one with a single."""
        time_ms, at, now = int(time.time() * 1000), step or 0, time.monotonic()
        fresh = [(key, float(value)) for key, value in metrics.items() if at > self._known.get(key, -1)]
        self.outbox["points"] += [[key, value, time_ms, at] for key, value in fresh]
        if now - self._last_flush > 5 and now > self._retry_at:
            self.flush()

    def send(self, patient: bool = False) -> None:
        """Send everything, each thing leaving the outbox once it is there; a call takes at most 1,000 points. Raises
        StoreError if the store does not answer or refuses."""
        from mlflow.entities import Metric, Param, RunTag

        left = self.outbox
        with self.asking(patient) as client:
            run_id = str(self.run_id)
            if left["params"] or left["tags"]:
                # A param never changes: what a resumed run sets anew becomes a tag.
                known = client.get_run(run_id).data.params
                again = {key: value for key, value in left["params"].items() if known.get(key, value) != value}
                tags = left["tags"] | {f"resumed.{key}": value for key, value in again.items()}
                params = [Param(key, value) for key, value in left["params"].items() if key not in known]
                client.log_batch(run_id, params=params, tags=[RunTag(key, value) for key, value in tags.items()])
                left["params"], left["tags"] = {}, {}
            while left["documents"]:
                if self._folder and (path := self._folder / left["documents"][0]).is_file():
                    client.log_artifact(run_id, str(path))
                del left["documents"][0]
            while left["points"]:
                client.log_batch(run_id, metrics=[Metric(*point) for point in left["points"][:1000]])
                del left["points"][:1000]
            if left["status"]:
                client.set_terminated(run_id, left["status"], left["ended"])
                left["status"] = None
        self._error = None
        if self._folder:
            (self._folder / UNSENT).unlink(missing_ok=True)

    @rank_zero_only
    def flush(self, patient: bool = False) -> None:
        """Send everything, or keep it, and say so, where that can't be done now. Raises StoreError if the store refuses
        from the start."""
        self._last_flush, before = time.monotonic(), self._error
        try:
            self.send(patient)
        except StoreError as error:
            if not (self._connected or before or isinstance(error, StoreAway)):
                raise
            if not before:
                rank_zero_info(f"warning: {error} {KEPT}")
            self._error = error
            return self.keep()
        if before:
            rank_zero_info("MLflow answers again, and has got everything.")

    def keep(self) -> None:
        """Write down, in the run's folder, what the store has not got."""
        if self._folder:
            replace_file(self._folder / UNSENT, json.dumps(self.outbox).encode())

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Called by the Trainer at the end of each of its loops, with `success` or `failed`."""
        if not (self._connected or self._folder or self.outbox["points"]):
            return
        if not (status == "success" and self.keep_open):
            stopped = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SIGTERMException))
            self.outbox["status"] = "FINISHED" if status == "success" else "KILLED" if stopped else "FAILED"
            self.outbox["ended"] = int(time.time() * 1000)
        self.flush(patient=status == "success")  # a process that was told to stop has seconds
