"""MLflow's store: where it is, and what its errors come down to."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from filelock import FileLock

from . import ROOT, UserError

# Read when mlflow is first used. No usage statistics leave the machine, and a server that is away is reported within
# seconds instead of after minutes of retries.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

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


ADVICE = "Start the server, unset MLFLOW_TRACKING_URI to use the project's own store, or set --trainer.logger false."


class StoreError(UserError):
    """The tracking store does not answer, or refuses."""


class StoreAway(StoreError):
    """The tracking store does not answer, which may pass."""


def without_password(text: str) -> str:
    """A message without what addresses in it may say of users, passwords and keys."""
    return re.sub(r"(?<=//)[^/\s]*@|\?[^\s:]*", "", text)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def plain_errors(uri: str) -> Iterator[None]:
    """Turn what a store raises, in many lines and of several kinds, into one StoreError that shows no password."""
    import requests
    from mlflow import MlflowException
    from sqlalchemy.exc import OperationalError, SQLAlchemyError

    passing = (requests.ConnectionError, requests.Timeout, requests.exceptions.RetryError, OperationalError)
    try:
        yield
    except (MlflowException, SQLAlchemyError, ImportError, OSError) as error:  # a driver is missing, or no answer came
        chain = [item for item in causes(error) if isinstance(item, (OSError, SQLAlchemyError))]
        away = any(isinstance(item, passing) for item in chain)
        shown = chain[-1] if away else error  # what is around "Connection refused" says nothing more, at length
        reason = (str(shown).strip() or type(shown).__name__).splitlines()[0].rstrip(".")
        message = without_password(f"MLflow at {uri}{' does not answer' * away}: {reason}")[:400]
        raise (StoreAway if away else StoreError)(f"{message}. {ADVICE}") from error


@contextmanager
def existing_is_fine() -> Iterator[None]:
    """For creating what another process may be creating at this very moment."""
    from mlflow import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def find_run(client: Any, token: str) -> str | None:
    """The id of the run with this token, in whatever experiment."""
    everywhere = [item.experiment_id for item in client.search_experiments()]
    found = client.search_runs(everywhere, f"tags.token = '{token}'")
    return found[0].info.run_id if found else None


def make_run(client: Any, experiment: str, location: str | None, name: str | None, token: str, began: int) -> str:
    """A new run, which began then, in ms since 1970, of an experiment that may be new as well; returns its id."""
    from mlflow.tracking.context.registry import resolve_tags

    with existing_is_fine():  # it mostly does; and another process may be making it at this very moment
        client.create_experiment(experiment, location)
    experiment_id = client.get_experiment_by_name(experiment).experiment_id
    return str(client.create_run(experiment_id, began, resolve_tags({"token": token}), name).info.run_id)


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
