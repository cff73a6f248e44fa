"""Model versions: what is registered, what is said of it, and which version is champion."""

import importlib.metadata
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import onnxruntime as ort
import pytest

from {{ cookiecutter.package_name }} import PACKAGE, UserError
from {{ cookiecutter.package_name }}.images import file_hash
from {{ cookiecutter.package_name }}.registry import Registry, register_best
from {{ cookiecutter.package_name }}.store import StoreError
from {{ cookiecutter.package_name }}.tracking import MLflowRun


@pytest.fixture
def client(trained: SimpleNamespace) -> Any:
    """MLflow's client on the store that `fit` wrote to, which its functions use as well."""
    client = MLflowRun().experiment
    mlflow.set_tracking_uri(client.tracking_uri)
    return client


@pytest.fixture
def version(client: Any) -> Any:
    """The version that `fit` registered."""
    return client.get_model_version_by_alias(PACKAGE.name, "candidate")


@pytest.fixture
def metrics(trained: SimpleNamespace) -> dict[str, float]:
    """Those of the best checkpoint."""
    content: dict[str, float] = json.loads((trained.folder / "metrics.json").read_text())
    return {key: value for key, value in content.items() if key not in ("checkpoint_sha256", "per_class")}


@pytest.fixture
def files(client: Any, version: Any, tmp_path: Path) -> Path:
    """The registered files."""
    return Path(mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}", dst_path=tmp_path))


@pytest.fixture
def run_again(trained: SimpleNamespace, metrics: dict[str, float], client: Any) -> Iterator[Callable[..., str]]:
    """`run_again(folder)` registers the export in a run's folder, under the MLflow run of the trained one."""
    run = MLflowRun()
    run.use_folder(trained.folder)

    def register(folder: Path = trained.folder, registry: Registry | None = None, **changes: float) -> str:
        checkpoint = folder / "checkpoints" / "best.ckpt"
        return (registry or Registry()).run(run, checkpoint, {**metrics, **changes})

    yield register
    run.finalize()


@pytest.fixture
def contest(client: Any, request: pytest.FixtureRequest) -> Callable[..., str]:
    """`contest(val_loss=0.3)` makes a version with these tags under a name of the test's own, and promotes it."""
    registry = Registry(model_name=request.node.name.replace("[", "-").replace("]", ""))
    client.create_registered_model(registry.model_name)

    def run(mode: str = "min", min_delta: float = 0.0, **tags: Any) -> str:
        registry.mode, registry.min_delta = mode, min_delta
        tags = {"data_hash": "a", "split_hash": "b", **tags}
        version = client.create_model_version(registry.model_name, "file:///nowhere", tags=tags)
        return registry.promote(client, version)

    return run


def champion(client: Any, name: str) -> str:
    return str(client.get_model_version_by_alias(name, "champion").version)


# What is registered


def test_fit_registers_a_version(trained: SimpleNamespace) -> None:
    assert f"registered       {PACKAGE.name} version 1 as @candidate and @champion: the first version" in trained.output


def test_version_belongs_to_the_run_that_trained_it(version: Any, trained: SimpleNamespace) -> None:
    assert version.run_id == (trained.folder / "mlflow_run_id").read_text()


def test_version_has_the_hashes_of_data_split_and_files(version: Any, trained: SimpleNamespace) -> None:
    contract = json.loads((trained.folder / "export" / "contract.json").read_text("utf-8"))
    keys = ("data_hash", "split_hash", "onnx_sha256", "checkpoint_sha256")
    assert [version.tags[key] for key in keys] == [contract[key] for key in keys]


def test_version_has_the_metrics_of_its_checkpoint(version: Any, metrics: dict[str, float]) -> None:
    assert {key: float(version.tags[key]) for key in metrics} == metrics


def test_version_says_what_it_is_made_of(version: Any) -> None:
    facts = {"git_commit", "git_dirty", "python_version", "torch_version", "lightning_version", "command", "classes"}
    assert facts <= version.tags.keys()


def test_version_names_the_installed_torch(version: Any) -> None:
    assert version.tags["torch_version"].split("+")[0] == importlib.metadata.version("torch").split("+")[0]


def test_version_has_latency_and_memory_at_each_batch_size(version: Any, recipe: dict[str, Any]) -> None:
    sizes = recipe["onnx"]["batch_sizes"]
    names = [f"onnx_batch{size}_{key}" for size in sizes for key in ("p50_ms", "p99_ms", "peak_memory_mb")]
    assert min(float(version.tags[name]) for name in names) > 0


def test_version_says_why_it_was_promoted(version: Any) -> None:
    assert version.tags["promotion"] == "the first version"


def test_registered_file_computes_what_the_export_does(files: Path, trained: SimpleNamespace) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), np.uint8)
    registered, exported = (
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"images": images})[0]
        for path in (files / "model.onnx", trained.folder / "export" / "model.onnx")
    )
    np.testing.assert_array_equal(registered, exported)


def test_no_registered_file_holds_pickled_objects(files: Path) -> None:
    kinds = {path.suffix for path in files.rglob("*") if path.is_file()}
    assert kinds <= {".onnx", ".yaml", ".yml", ".txt", ".json", ""}


def test_registered_model_has_signature_and_contract(files: Path, trained: SimpleNamespace) -> None:
    info = mlflow.models.get_model_info(str(files))
    contract = json.loads((trained.folder / "export" / "contract.json").read_text("utf-8"))
    assert (info.signature.inputs.inputs[0].shape, info.metadata["contract"]) == ((-1, 1, 8, 8), contract)


def test_registered_requirements_are_pinned(files: Path) -> None:
    lines = (files / "requirements.txt").read_text().split()
    assert f"onnxruntime=={importlib.metadata.version('onnxruntime')}" in lines


def test_run_holds_the_export_and_its_contract(client: Any, version: Any) -> None:
    paths = {item.path for item in client.list_artifacts(version.run_id, "export")}
    assert paths == {"export/model.onnx", "export/contract.json"}


def test_run_holds_its_splits_and_a_picture_of_a_batch(client: Any, version: Any) -> None:
    assert {"split.csv", "train_batch.png"} <= {item.path for item in client.list_artifacts(version.run_id)}


def test_run_knows_which_data_it_was_trained_on(client: Any, version: Any) -> None:
    (dataset,) = client.get_run(version.run_id).inputs.dataset_inputs
    assert version.tags["data_hash"].startswith(dataset.dataset.digest)


def test_registering_again_finds_the_same_version(run_again: Callable[..., str], client: Any) -> None:
    text = run_again()
    count = len(client.search_model_versions(f"name = '{PACKAGE.name}'"))
    assert (text, count) == (f"{PACKAGE.name} version 1 is @champion: the first version", 1)


# What is refused


def test_checkpoint_without_export_is_refused(
    run_again: Callable[..., str], trained: SimpleNamespace, tmp_path: Path
) -> None:
    shutil.copytree(trained.folder / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(UserError, match="holds no export of .*best.ckpt. Run: python -m .* export .*best.ckpt"):
        run_again(tmp_path)


def test_export_of_another_checkpoint_is_refused(
    run_again: Callable[..., str], trained: SimpleNamespace, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    (folder / "checkpoints" / "last.ckpt").replace(folder / "checkpoints" / "best.ckpt")
    with (folder / "checkpoints" / "best.ckpt").open("ab") as file:
        file.write(b"0")
    with pytest.raises(UserError, match="holds no export of"):
        run_again(folder)


def test_export_that_was_changed_is_refused(
    run_again: Callable[..., str], trained: SimpleNamespace, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    with (folder / "export" / "model.onnx").open("ab") as file:
        file.write(b"0")
    with pytest.raises(UserError, match="model.onnx was changed after it was proven. Export .* again"):
        run_again(folder)


def test_metrics_of_other_data_are_not_taken_for_those_of_the_checkpoint(
    trained: SimpleNamespace, command: Callable[..., str]
) -> None:
    with pytest.raises(SystemExit, match="trained on data .* Bring back the same files and split"):
        command("register", str(trained.best), "--data.split_seed", "7")


def test_metrics_that_the_export_does_not_have_are_refused(run_again: Callable[..., str]) -> None:
    with pytest.raises(UserError, match="val_acc is 2, but .* through ONNX: nothing is registered"):
        run_again(val_acc=2.0)


def test_switched_off_registry_says_so(
    trained: SimpleNamespace, make_trainer: Callable[..., Any], metrics: dict[str, float]
) -> None:
    trainer = make_trainer(callbacks=[Registry()], max_epochs=1)  # and no logger
    assert "nothing" in register_best(trainer, trained.best, metrics)[0]


# Which version is champion


def test_first_version_is_champion(contest: Callable[..., str]) -> None:
    assert contest(val_loss=0.5).endswith("version 1 as @candidate and @champion: the first version")


def test_better_version_becomes_champion(
    contest: Callable[..., str], request: pytest.FixtureRequest, client: Any
) -> None:
    contest(val_loss=0.5)
    contest(val_loss=0.4)
    assert champion(client, request.node.name) == "2"


@pytest.mark.parametrize("val_loss", [0.5, 0.6])
def test_version_that_is_no_better_is_candidate_alone(contest: Callable[..., str], val_loss: float) -> None:
    contest(val_loss=0.5)
    assert contest(val_loss=val_loss).endswith(f"as @candidate: val_loss {val_loss} does not beat 0.5 of version 1")


def test_worse_version_leaves_the_champion(
    contest: Callable[..., str], request: pytest.FixtureRequest, client: Any
) -> None:
    contest(val_loss=0.5)
    contest(val_loss=0.6)
    assert champion(client, request.node.name) == "1"


def test_newest_version_is_always_candidate(
    contest: Callable[..., str], request: pytest.FixtureRequest, client: Any
) -> None:
    contest(val_loss=0.5)
    contest(val_loss=0.6)
    assert str(client.get_model_version_by_alias(request.node.name, "candidate").version) == "2"


def test_in_mode_max_more_is_better(contest: Callable[..., str]) -> None:
    contest(val_loss=0.5)
    assert "val_loss 0.6 beats 0.5 of version 1" in contest(val_loss=0.6, mode="max")


def test_version_has_to_be_better_by_more_than_min_delta(contest: Callable[..., str]) -> None:
    contest(val_loss=0.5)
    assert "does not beat" in contest(val_loss=0.45, min_delta=0.1)


@pytest.mark.parametrize("key", ["data_hash", "split_hash"])
def test_version_on_other_data_or_another_split_is_not_compared(contest: Callable[..., str], key: str) -> None:
    contest(val_loss=0.5)
    assert contest(val_loss=0.1, **{key: "z"}).endswith(
        f"as @candidate: the champion, version 1, was measured on another {key}"
    )


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_version_without_a_finite_metric_is_no_champion(contest: Callable[..., str], value: str) -> None:
    assert contest(val_loss=value).endswith(f"as @candidate: val_loss is {value}")


def test_reason_is_kept_on_the_version(
    contest: Callable[..., str], request: pytest.FixtureRequest, client: Any
) -> None:
    contest(val_loss=0.5)
    contest(val_loss=0.4)
    tags = client.get_model_version(request.node.name, "2").tags
    assert tags["promotion"] == "val_loss 0.4 beats 0.5 of version 1"


def test_checkpoint_that_was_exported_stays_as_it_is(trained: SimpleNamespace) -> None:
    contract = json.loads((trained.folder / "export" / "contract.json").read_text("utf-8"))
    assert file_hash(trained.best) == contract["checkpoint_sha256"]


@pytest.mark.parametrize("step", ["onnx.log_model", "log_input", "log_artifacts", "register_model"])
def test_a_registration_that_was_killed_is_completed_and_doubles_nothing(
    run_again: Callable[..., str], client: Any, version: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def models() -> dict[str, set[str]]:
        experiment = client.get_run(version.run_id).info.experiment_id
        found = client.search_logged_models([experiment], f"source_run_id = '{version.run_id}'")
        return {item.model_id: {metric.key for metric in item.metrics} for item in found}

    def count() -> int:
        return len(client.get_metric_history(version.run_id, "best_val_loss"))

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    name = f"killed-{step}"
    known, points, registry = models(), count(), Registry(model_name=name)
    with monkeypatch.context() as patch:
        patch.setattr(f"mlflow.{step}", killed)
        with pytest.raises(KeyboardInterrupt):
            run_again(registry=registry)
    run_again(registry=registry)
    (new,) = models().keys() - known.keys()
    assert known.keys() < models().keys() and "best_val_loss" in models()[new] and count() <= points + 1
    assert client.get_registered_model(name).aliases == {"candidate": 1, "champion": 1}


# Several at once


def test_first_runs_at_the_same_moment_all_find_a_registry_that_answers(project: Path) -> None:
    run = MLflowRun("several")
    registry = Registry(model_name="several")
    barrier = threading.Barrier(8)

    def rehearse(_: int) -> str:
        barrier.wait()
        return registry.rehearse(SimpleNamespace(logger=run), None, None).split(";")[0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(rehearse, range(8))) == {"registry answers"}


def test_the_run_has_recipe_environment_split_and_picture_as_files(client: Any, version: Any) -> None:
    names = {item.path for item in client.list_artifacts(version.run_id)}
    assert {"recipe.yaml", "environment.txt", "split.csv", "train_batch.png"} <= names


def test_metrics_of_each_class_are_kept(trained: SimpleNamespace) -> None:
    content = json.loads((trained.folder / "metrics.json").read_text())["per_class"]
    assert {name: list(values) for name, values in content.items()} == {
        "val_acc_per_class": [str(row) for row in range(10)],
        "test_acc_per_class": [str(row) for row in range(10)],
    }


def test_a_store_that_went_away_leaves_registration_for_later(
    trained: SimpleNamespace, metrics: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, run = Registry(), MLflowRun()

    def refuse(*_: Any) -> str:
        raise StoreError("MLflow at http://127.0.0.1:9: connection refused")

    monkeypatch.setattr(registry, "run", refuse)
    trainer: Any = SimpleNamespace(callbacks=[registry], logger=run)
    first, second = register_best(trainer, trained.best, metrics)
    assert first == "registered       nothing yet: MLflow at http://127.0.0.1:9: connection refused"
    assert second.startswith("                 later: python -m ") and second.endswith("checkpoints/best.ckpt")
