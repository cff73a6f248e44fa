"""MLflow tracking: for each training a run with its curves, its hyperparameters and its facts."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from . import PACKAGE, store
from .images import replace_file
from .store import UNSENT, StoreError, existing_is_fine, impatient, plain_errors, read_unsent

RETRY_AFTER = 30.0  # seconds, in which a store that did not answer is left alone


class MLflowRun(MLFlowLogger):
    """Lightning's MLflow logger, with a store of the project's own, points sent in batches, and a run that a resumed
    process goes on with.

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
        self._pending: list[Any] = []
        self._known: dict[str, int] = {}  # the newest step of each metric that a stopped process had recorded
        self._last_flush = time.monotonic()
        self._retry_at = 0.0
        self._away = False  # whether the store did not answer the last time
        self._folder: Path | None = None

    @rank_zero_only
    def use_folder(self, folder: Path) -> None:
        """Go on with the MLflow run that the folder notes, or note this one in it and give it the folder's name."""
        note, self._folder = folder / "mlflow_run_id", folder
        if note.is_file():
            self._run_id = note.read_text()
            if (folder / UNSENT).is_file():
                self._pending = read_unsent(folder)[0] + self._pending
        else:
            self.experiment.update_run(self.run_id, name=folder.name)
            replace_file(note, str(self.run_id).encode())

    @property
    def client(self) -> Any:
        """The MlflowClient, before there is a run."""
        return self._mlflow_client

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The MlflowClient; the first use connects and creates the run.

        Raises:
            UserError: The store does not answer or refuses.
        """
        if self._initialized:
            return self._mlflow_client
        with plain_errors(self._tracking_uri), store.STORE_LOCK:
            with existing_is_fine():
                _ = super().experiment
            client = super().experiment  # finds the experiment, where another process has just made it
            client.update_run(self._run_id, "RUNNING")
            newest = client.get_run(self._run_id).data.metrics  # of a run that goes on; a new one has none
            points = {key: client.get_metric_history(self._run_id, key) for key in newest}
            self._known = {key: max(point.step for point in history) for key, history in points.items()}
            self._known |= {point.key: max(point.step, self._known.get(point.key, -1)) for point in self._pending}
        return client

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        client = self.experiment
        with plain_errors(self._tracking_uri):
            client.log_batch(self._run_id, tags=[RunTag(key, str(value)[:5000]) for key, value in tags.items()])

    @rank_zero_only
    def log_documents(self, documents: Mapping[str, bytes]) -> None:
        """Keep small files with the run, as artifacts, by name."""
        client = self.experiment
        with tempfile.TemporaryDirectory() as folder, plain_errors(self._tracking_uri):
            for name, content in documents.items():
                (Path(folder) / name).write_bytes(content)
            client.log_artifacts(self._run_id, folder)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log as MLflow params, whole. A param never changes: what a resumed run sets anew becomes a tag."""
        from mlflow.entities import Param

        client = self.experiment
        values = {key: str(value)[:6000] for key, value in dict(params).items() if not key.startswith("_")}
        with plain_errors(self._tracking_uri):
            known = client.get_run(self._run_id).data.params
            client.log_batch(self._run_id, params=[Param(*item) for item in values.items() if item[0] not in known])
        self.log_tags({f"resumed.{key}": value for key, value in values.items() if known.get(key, value) != value})

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Collect, and send every 5 seconds: a call with many points costs the store as much as one with a single."""
        from mlflow.entities import Metric

        now, at = int(time.time() * 1000), step or 0
        fresh = {key: value for key, value in metrics.items() if at > self._known.get(key, -1)}
        self._pending += [Metric(key, float(value), now, at) for key, value in fresh.items()]
        if time.monotonic() - self._last_flush > 5:
            self.flush()

    def flush(self, force: bool = False) -> None:
        """Send what is collected; the store takes at most 1,000 points in a call. Where it does not answer, training
        goes on: what is not sent is kept in the run's folder, tried again, and sent at the latest by the next run."""
        client = self.experiment
        self._last_flush = time.monotonic()
        if self._last_flush < self._retry_at and not force:
            return self.keep()
        try:
            with impatient(), plain_errors(self._tracking_uri):
                while self._pending:
                    client.log_batch(self._run_id, metrics=self._pending[:1000])
                    del self._pending[:1000]
        except StoreError as error:
            self._retry_at = time.monotonic() + RETRY_AFTER
            if not self._away:
                rank_zero_info(f"warning: {error} Training goes on; what can't be sent is kept in the run's folder.")
            self._away = True
            return self.keep()
        if self._away:
            rank_zero_info("MLflow answers again, and has got everything.")
            self._away = False
        if self._folder:
            (self._folder / UNSENT).unlink(missing_ok=True)

    def keep(self, status: str | None = None) -> None:
        """Write down what the store has not got: points, and with which status the run ended."""
        if self._folder:
            points = [[point.key, point.value, point.timestamp, point.step] for point in self._pending]
            replace_file(self._folder / UNSENT, json.dumps({"points": points, "status": status}).encode())

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Called by the Trainer at the end of each of its loops, with `success` or `failed`."""
        if not (self._initialized or self._pending):
            return
        self.flush(force=True)
        if not (status == "success" and self.keep_open):
            stopped = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SIGTERMException))
            end = "FINISHED" if status == "success" else "KILLED" if stopped else "FAILED"
            try:
                with impatient(), plain_errors(self._tracking_uri):
                    self._mlflow_client.set_terminated(str(self._run_id), end)
            except StoreError:
                self.keep(end)
