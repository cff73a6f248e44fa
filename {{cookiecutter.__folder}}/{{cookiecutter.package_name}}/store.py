"""MLflow's store: where it is, what its errors come down to, and what it has not got yet."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info

from . import ROOT, UserError

# Read when mlflow is first used. No usage statistics leave the machine, and a server that is away is reported within
# seconds instead of after minutes of retries.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

UNSENT = "unsent.json"
STORE_LOCK = FileLock(ROOT / ".mlflow.lock")


def embedded_store() -> str:
    """URI of the project's own store, `mlflow.db`. Made once: in a file aside, under a lock, and then renamed, because
    MLflow builds its tables without a lock, and two processes or a kill in the middle would spoil them for good."""
    from mlflow import MlflowClient

    path, part = ROOT / "mlflow.db", ROOT / ".mlflow.db.part"
    with STORE_LOCK:
        if not path.is_file():
            part.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{part}").search_experiments()
            part.replace(path)
    return f"sqlite:///{path}"


class StoreError(UserError):
    """The tracking store does not answer, or refuses."""


@contextmanager
def plain_errors(uri: str) -> Iterator[None]:
    """Turn what a store raises, in many lines and of several kinds, into one StoreError that shows no password."""
    from mlflow import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, ImportError, OSError) as error:  # a driver is missing, or no answer came
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = re.sub(r"(?<=//)[^/\s]*@|\?[^\s:]*", "", f"MLflow at {uri}: {reason}")
        raise StoreError(
            f"{message[:400]} Start the server, unset MLFLOW_TRACKING_URI to use the project's own store, or set "
            "--trainer.logger false."
        ) from error


@contextmanager
def existing_is_fine() -> Iterator[None]:
    """For creating what another process may be creating at this very moment."""
    from mlflow import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


@contextmanager
def impatient() -> Iterator[None]:
    """While training waits, a store that hangs is given up after seconds; MLflow reads these at each call."""
    names = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
    before = {name: os.environ[name] for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.update(before)


def read_unsent(folder: Path) -> tuple[list[Any], str | None]:
    """What `MLflowRun.keep` wrote down: points as Metric entities, and the status of a run that ended."""
    from mlflow.entities import Metric

    content = json.loads((folder / UNSENT).read_text())
    return [Metric(*point) for point in content["points"]], content["status"]


def send_unsent(client: Any, folder: Path) -> None:
    """Send what the store has not got of an earlier run. Points keep their time, so that none comes twice.

    Raises:
        StoreError: It still does not answer.
    """
    (points, status), run_id = read_unsent(folder), (folder / "mlflow_run_id").read_text()
    with impatient(), plain_errors(client.tracking_uri):
        for start in range(0, len(points), 1000):
            client.log_batch(run_id, metrics=points[start : start + 1000])
        if status:
            client.set_terminated(run_id, status)
    (folder / UNSENT).unlink(missing_ok=True)
    rank_zero_info(f"MLflow has got {len(points)} points of {folder.name}, which it did not take at the time.")
