"""The tracking store and the run: made once, written in batches, continued on resume, ended with the right status."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from mlflow import MlflowClient, MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from {{ cookiecutter.package_name }} import PACKAGE, UserError, runs
from {{ cookiecutter.package_name }}.facts import command_output, run_documents, run_facts
from {{ cookiecutter.package_name }}.stopped import sync, tidy_store
from {{ cookiecutter.package_name }}.store import StoreAway, StoreError, embedded_store, impatient
from {{ cookiecutter.package_name }}.tracking import NOTE, UNSENT, MLflowRun


@pytest.fixture
def logger() -> Iterator[MLflowRun]:
    run = MLflowRun("tracking")
    yield run
    run.finalize("success")


def status(run: MLflowRun) -> str:
    return str(run.experiment.get_run(run.run_id).info.status)


def test_several_processes_make_the_store_at_once(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); from filelock import FileLock\n"
        f"from pathlib import Path; from {PACKAGE.name} import store, tracking\n"
        f"store.ROOT = Path({str(tmp_path)!r}); store.STORE_LOCK = FileLock({str(tmp_path / 'lock')!r})\n"
        "print(tracking.MLflowRun('first').run_id)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) for _ in range(3)]
    for process in processes:
        process.wait(timeout=120)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("first")
    assert len(client.search_runs([experiment.experiment_id])) == 3


def test_a_half_built_store_is_built_anew(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("{{ cookiecutter.package_name }}.store.ROOT", tmp_path)
    (tmp_path / ".mlflow.db.part").write_bytes(b"killed in the middle")
    assert MlflowClient(embedded_store()).search_experiments()[0].name == "Default"


def test_no_point_is_lost(logger: MLflowRun) -> None:
    for step in range(2500):
        logger.log_metrics({"loss": step / 2}, step)
    logger.finalize("success")
    points = logger.experiment.get_metric_history(logger.run_id, "loss")
    assert sorted((point.step, point.value) for point in points) == [(step, step / 2) for step in range(2500)]


def test_points_are_collected_before_they_are_sent(logger: MLflowRun) -> None:
    logger.log_metrics({"loss": 1.0}, 0)
    assert logger.experiment.get_run(logger.run_id).data.metrics == {}


def test_the_run_has_the_name_of_its_folder(logger: MLflowRun, tmp_path: Path) -> None:
    logger.use_folder(tmp_path)
    assert logger.experiment.get_run(logger.run_id).info.run_name == tmp_path.name


def test_a_folder_leads_back_to_its_run(logger: MLflowRun, tmp_path: Path) -> None:
    logger.use_folder(tmp_path)
    logger.flush()
    again = MLflowRun("tracking")
    again.use_folder(tmp_path)
    assert again.run_id == logger.run_id


def test_a_process_that_was_killed_when_it_had_made_its_run_leaves_no_second_one(
    logger: MLflowRun, tmp_path: Path
) -> None:
    logger.use_folder(tmp_path)
    logger.keep()
    content = (tmp_path / UNSENT).read_bytes()
    logger.flush()
    (tmp_path / NOTE).unlink()
    (tmp_path / UNSENT).write_bytes(content)
    again = MLflowRun("tracking")
    again.use_folder(tmp_path)
    assert again.run_id == logger.run_id


def test_a_long_hyperparameter_is_kept_whole(logger: MLflowRun) -> None:
    logger.log_hyperparams({"long": "x" * 5000, "_instantiator": "not a hyperparameter"})
    logger.flush()
    assert logger.experiment.get_run(logger.run_id).data.params == {"long": "x" * 5000}


def test_a_hyperparameter_that_changes_on_resume_becomes_a_tag(logger: MLflowRun) -> None:
    for batch_size in (64, 32):
        logger.log_hyperparams({"batch_size": batch_size})
        logger.flush()
    assert logger.experiment.get_run(logger.run_id).data.tags["resumed.batch_size"] == "32"


def test_success_ends_the_run(logger: MLflowRun) -> None:
    logger.log_metrics({"loss": 1.0})
    logger.finalize("success")
    assert status(logger) == "FINISHED"


def test_a_run_that_is_kept_open_goes_on_after_training(logger: MLflowRun) -> None:
    logger.keep_open = True
    logger.log_metrics({"loss": 1.0})
    logger.finalize("success")
    assert status(logger) == "RUNNING"


def test_a_failure_is_recorded(logger: MLflowRun) -> None:
    logger.log_metrics({"loss": 1.0})
    logger.finalize("failed")
    assert status(logger) == "FAILED"


def test_an_interruption_is_recorded_as_killed(logger: MLflowRun) -> None:
    logger.log_metrics({"loss": 1.0})
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        logger.finalize("failed")
    assert status(logger) == "KILLED"


def test_the_address_of_a_server_is_read_when_the_run_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    assert MLflowRun().experiment.tracking_uri == f"sqlite:///{tmp_path / 'other.db'}"


@pytest.mark.parametrize(
    "uri",
    [
        "http://user:secret@127.0.0.1:9",
        "http://127.0.0.1:9/?password=secret",
        "unknown://user:secret@127.0.0.1:9/x",
        "postgresql://user:secret@127.0.0.1:9/x",
    ],
)
def test_a_store_that_does_not_answer_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError) as caught:
        _ = MLflowRun(tracking_uri=uri).run_id
    assert ("127.0.0.1:9" in str(caught.value), "secret" in str(caught.value)) == (True, False)


# A store that is away

Go = Callable[[bool], None]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said to the user."""
    found: list[str] = []
    for module in ("tracking", "stopped"):
        monkeypatch.setattr(f"{{ cookiecutter.package_name }}.{module}.rank_zero_info", found.append)
    return found


@pytest.fixture
def go_away(monkeypatch: pytest.MonkeyPatch) -> Go:
    """`go_away(True)` lets no store answer any more; `go_away(False)` brings them back."""
    gone = {"now": False}

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if gone["now"]:
                raise MlflowException("API request failed") from requests.ConnectionError("connection refused")
            return method(*args, **kwargs)

        return call

    for name in ("create_run", "get_run", "get_experiment_by_name", "log_artifact", "log_batch", "set_terminated"):
        monkeypatch.setattr(MlflowClient, name, guarded(getattr(MlflowClient, name)))
    return lambda now: gone.update(now=now)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a run."""
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    (tmp_path / "runs" / "run").mkdir(parents=True)
    return tmp_path / "runs" / "run"


@pytest.fixture
def make(folder: Path) -> Callable[..., MLflowRun]:
    """`make()` is the logger that a process has, which trains in the folder."""

    def logger(used: bool = True) -> MLflowRun:
        run = MLflowRun("away", f"sqlite:///{folder.parents[1] / 'store.db'}")
        if used:
            run.use_folder(folder)
        return run

    return logger


Make = Callable[..., MLflowRun]


def steps(run: MLflowRun) -> list[int]:
    return sorted(point.step for point in run.experiment.get_metric_history(run.run_id, "loss"))


def test_training_goes_on_without_its_store_and_nothing_is_lost(
    make: Make, go_away: Go, lines: list[str], folder: Path
) -> None:
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    run.flush()
    go_away(True)
    for step in range(1, 4):
        run.log_metrics({"loss": 1.0}, step)
        run.flush(patient=True)
    assert [line[:26] for line in lines] == ["warning: MLflow at sqlite:"]  # said once
    assert (folder / UNSENT).is_file()
    go_away(False)
    run.finalize("success")
    assert (steps(run), (folder / UNSENT).exists()) == ([0, 1, 2, 3], False)
    assert (lines[-1], status(run)) == ("MLflow answers again, and has got everything.", "FINISHED")


def test_training_starts_without_its_store_and_nothing_is_lost(
    make: Make, go_away: Go, lines: list[str], folder: Path
) -> None:
    go_away(True)
    run = make()
    run.log_hyperparams({"lr": 0.1})
    run.log_tags({"code": "this"})
    (folder / "notes.txt").write_text("kept")
    run.log_documents(["notes.txt"])
    run.flush()
    run.log_metrics({"loss": 1.0}, 0)
    run.finalize("success")
    assert ([line[:26] for line in lines], run._run_id) == (["warning: MLflow at sqlite:"], None)
    go_away(False)
    assert tidy_store(make(used=False), None) == 1
    again = make()
    data, names = again.experiment.get_run(again.run_id).data, again.experiment.list_artifacts(again.run_id)
    assert (data.params, data.tags["code"], [item.path for item in names]) == ({"lr": "0.1"}, "this", ["notes.txt"])
    info = again.experiment.get_run(again.run_id).info
    assert (steps(again), info.run_name, info.start_time) == ([0], "run", run.outbox["began"])
    assert not (folder / UNSENT).exists()


def test_a_run_that_ended_without_its_store_has_its_status_there(make: Make, go_away: Go, folder: Path) -> None:
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    run.flush()
    go_away(True)
    run.finalize("failed")
    ended = run.outbox["ended"]
    go_away(False)
    time.sleep(0.01)
    tidy_store(make(used=False), None)
    info = run.experiment.get_run(run.run_id).info
    assert (info.status, info.start_time, info.end_time) == ("FAILED", run.outbox["began"], ended)


def test_a_refusal_later_stops_nothing(make: Make, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MlflowException("no permission", error_code=PERMISSION_DENIED)

    run = make()
    run.flush()
    monkeypatch.setattr(MlflowClient, "log_batch", refuse)
    for step in range(2):
        run.log_metrics({"loss": 1.0}, step)
        run.flush()
    assert len(lines) == 1 and "no permission" in lines[0]


def test_a_store_that_is_away_when_it_is_tidied_is_named(make: Make, go_away: Go, lines: list[str]) -> None:
    go_away(True)
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    run.finalize("success")
    lines.clear()
    tidy_store(make(used=False), None)
    assert [line[:26] for line in lines] == ["warning: MLflow at sqlite:"]


def test_a_stopped_process_does_not_wait_for_its_store(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, times = make(), []
    run.flush()
    monkeypatch.setattr(
        MlflowClient, "set_terminated", lambda *_: times.append(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])
    )
    run.finalize("failed")
    assert times == ["5"]


def test_a_store_that_refuses_at_the_start_stops_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MlflowException("no permission", error_code=PERMISSION_DENIED)

    monkeypatch.setattr(MlflowClient, "create_run", refuse)
    with pytest.raises(StoreError, match="no permission"):
        make().flush()


def test_points_of_a_killed_process_that_its_store_has_as_killed_before_are_sent(
    make: Make, go_away: Go, folder: Path
) -> None:
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    run.outbox["status"] = "KILLED"
    run.flush()
    go_away(True)
    again = make()  # goes on, and is killed
    again.log_metrics({"loss": 1.0}, 1)
    again.flush()
    (folder / "unfinished").write_text("own")
    go_away(False)
    assert (tidy_store(make(used=False), None), steps(run), status(run)) == (1, [0, 1], "KILLED")


def test_what_a_living_process_could_not_send_is_left_to_it(make: Make, go_away: Go, folder: Path) -> None:
    go_away(True)
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    run.flush()
    go_away(False)
    assert (tidy_store(make(used=False), None), (folder / UNSENT).is_file()) == (0, True)


def test_a_run_for_another_store_is_sent_by_sync_alone(make: Make, go_away: Go, tmp_path: Path) -> None:
    go_away(True)
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    run.finalize("success")
    go_away(False)
    other = MLflowRun("away", f"sqlite:///{tmp_path / 'other.db'}")
    assert [tidy_store(other, None), tidy_store(other, None, patient=True)] == [0, 1]


def test_sync_says_that_the_store_is_still_away(make: Make, go_away: Go, folder: Path) -> None:
    go_away(True)
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    run.finalize("success")
    trainer: Any = SimpleNamespace(logger=make(used=False))
    with pytest.raises(StoreAway, match="connection refused|API request failed"):
        sync(trainer, None, None)  # type: ignore[arg-type]
    assert (folder / UNSENT).is_file()


def test_sync_says_that_nothing_is_left(make: Make, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = SimpleNamespace(logger=make(used=False))
    sync(trainer, None, None)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "MLflow has got everything.\n"


def test_a_store_that_is_away_is_left_alone_for_a_while(
    make: Make, go_away: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    run.flush()
    run.log_metrics({"loss": 1.0}, 0)
    go_away(True)
    run.flush()
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *_, **__: pytest.fail("tried again at once"))
    run.log_metrics({"loss": 1.0}, 1)
    run.flush()


def test_points_that_are_sent_twice_are_there_once(make: Make, go_away: Go, folder: Path) -> None:
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    go_away(True)
    run.finalize("success")
    content = (folder / UNSENT).read_bytes()
    go_away(False)
    run.flush(patient=True)
    (folder / UNSENT).write_bytes(content)  # killed after sending, before the file was taken away
    tidy_store(make(used=False), None)
    assert steps(run) == [0]


def test_several_that_tidy_at_once_send_each_point_once(
    make: Make, go_away: Go, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    go_away(True)
    run.finalize("success")
    go_away(False)
    send = MlflowClient.log_batch

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        send(*args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", slowly)
    with ThreadPoolExecutor(3) as pool:
        counts = list(pool.map(lambda _: tidy_store(make(used=False), None), range(3)))
    again = make()
    assert (sorted(counts), steps(again)) == ([0, 0, 1], [0])
    assert len(again.experiment.search_runs([again.experiment_id])) == 1


def test_a_resumed_run_sends_what_the_stopped_one_could_not(make: Make, go_away: Go) -> None:
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    go_away(True)
    run.flush()
    again = make()
    again.log_metrics({"loss": 2.0}, 0)  # the same step, done again
    again.log_metrics({"loss": 1.0}, 1)
    go_away(False)
    again.finalize("success")
    assert steps(again) == [0, 1]


def test_a_run_that_goes_on_without_its_store_doubles_no_point(make: Make, go_away: Go) -> None:
    run = make()
    run.log_metrics({"loss": 1.0}, 0)
    run.flush()
    go_away(True)
    again = make()
    for step in (0, 1):
        again.log_metrics({"loss": 2.0}, step)
    again.flush()
    go_away(False)
    again.finalize("success")
    assert steps(again) == [0, 1]


def test_a_hanging_store_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]
    with impatient():
        times = [int(os.environ[f"MLFLOW_HTTP_REQUEST_{name}"]) for name in ("MAX_RETRIES", "TIMEOUT")]
    assert (times[0] + 1) * times[1] <= 15 and os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == before


def test_an_experiment_that_another_process_has_just_made_is_used() -> None:
    first, second = MLflowRun("at once"), MLflowRun("at once")
    assert first.experiment_id is not None and first.experiment_id == second.experiment_id
    assert first.run_id != second.run_id


def test_a_run_knows_its_versions_and_its_code() -> None:
    versions = {"python_version", "torch_version", "cuda_version", "cudnn_version", "driver_version"}
    assert {"git_commit", "git_dirty", "device", "command"} | versions <= run_facts().keys()


def test_a_run_keeps_every_installed_version() -> None:
    lines = run_documents()["environment.txt"].decode().splitlines()
    assert {f"torch=={version('torch')}", f"mlflow=={version('mlflow')}"} <= set(lines)


def test_what_differs_from_the_commit_is_kept_and_can_be_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("{{ cookiecutter.package_name }}.facts.ROOT", tmp_path)
    assert "changes.patch" not in run_documents()  # no repository

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=A", "-c", "user.email=a@b.invalid"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    (tmp_path / "model.py").write_text("width = 1\n\n")
    (tmp_path / "old.txt").write_bytes(b"caf\xe9\n")  # no UTF-8
    for arguments in (["init"], ["add", "--all"], ["commit", "--message", "First"]):
        git(*arguments)
    assert "changes.patch" not in run_documents()
    (tmp_path / "model.py").write_text("width = 2\n\n")
    (tmp_path / "old.txt").write_bytes(b"th\xe9\n")
    (tmp_path / "new.py").write_text("")
    patch = run_documents()["changes.patch"]
    assert patch.startswith(b"#  M model.py\n#  M old.txt\n# ?? new.py\n")
    (tmp_path / "changes.patch").write_bytes(patch)
    git("checkout", "model.py", "old.txt")
    git("apply", "changes.patch")
    assert (tmp_path / "model.py").read_text() == "width = 2\n\n"
    assert (tmp_path / "old.txt").read_bytes() == b"th\xe9\n"


def test_a_program_that_is_missing_is_no_error() -> None:
    assert command_output("no-such-program") == "none"
