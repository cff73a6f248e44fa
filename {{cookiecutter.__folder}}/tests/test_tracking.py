"""The tracking store and the run: made once, written in batches, continued on resume, ended with the right status."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from mlflow import MlflowClient

from {{ cookiecutter.package_name }} import PACKAGE, UserError
from {{ cookiecutter.package_name }}.facts import command_output, run_documents, run_facts
from {{ cookiecutter.package_name }}.tracking import MLflowRun, embedded_store


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
        f"from pathlib import Path; from {PACKAGE.name} import tracking\n"
        f"tracking.ROOT = Path({str(tmp_path)!r}); tracking.STORE_LOCK = FileLock({str(tmp_path / 'lock')!r})\n"
        "print(tracking.MLflowRun('first').run_id)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) for _ in range(3)]
    for process in processes:
        process.wait(timeout=120)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("first")
    assert len(client.search_runs([experiment.experiment_id])) == 3


def test_a_half_built_store_is_built_anew(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("{{ cookiecutter.package_name }}.tracking.ROOT", tmp_path)
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
    again = MLflowRun("tracking")
    again.use_folder(tmp_path)
    assert again.run_id == logger.run_id


def test_a_long_hyperparameter_is_kept_whole(logger: MLflowRun) -> None:
    logger.log_hyperparams({"long": "x" * 5000, "_instantiator": "not a hyperparameter"})
    assert logger.experiment.get_run(logger.run_id).data.params == {"long": "x" * 5000}


def test_a_hyperparameter_that_changes_on_resume_becomes_a_tag(logger: MLflowRun) -> None:
    logger.log_hyperparams({"batch_size": 64})
    logger.log_hyperparams({"batch_size": 32})
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
    assert MLflowRun().client.tracking_uri == f"sqlite:///{tmp_path / 'other.db'}"


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


def test_a_store_that_breaks_in_the_middle_is_named_in_one_line(tmp_path: Path) -> None:
    run = MLflowRun(tracking_uri=f"sqlite:///{tmp_path / 'store.db'}")
    run.log_metrics({"loss": 1.0})
    _ = run.run_id
    (tmp_path / "store.db").write_bytes(b"no database at all" * 1000)
    with pytest.raises(UserError, match="^MLflow at sqlite:.*Start the server") as caught:
        run.flush()
    assert "\n" not in str(caught.value)


def test_an_experiment_that_another_process_has_just_made_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = MLflowRun("at once"), MLflowRun("at once")
    find = second.client.get_experiment_by_name
    answers = iter([None])  # what the second process was told before the first one made it
    monkeypatch.setattr(second.client, "get_experiment_by_name", lambda name: next(answers, find(name)))
    assert first.experiment_id == second.experiment_id


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

    (tmp_path / "model.py").write_text("width = 1\n")
    for arguments in (["init"], ["add", "--all"], ["commit", "--message", "First"]):
        git(*arguments)
    assert "changes.patch" not in run_documents()
    (tmp_path / "model.py").write_text("width = 2\n")
    (tmp_path / "new.py").write_text("")
    patch = run_documents()["changes.patch"]
    assert patch.startswith(b"#  M model.py\n# ?? new.py\n")
    (tmp_path / "changes.patch").write_bytes(patch)
    git("checkout", "model.py")
    git("apply", "changes.patch")
    assert (tmp_path / "model.py").read_text() == "width = 2\n"


def test_a_program_that_is_missing_is_no_error() -> None:
    assert command_output("no-such-program") == "none"
