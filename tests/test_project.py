"""A generated project at work: real trainings through its command line, each in a process of its own, as users do."""

import contextlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Bake
from mlflow import MlflowClient
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

NAME = "my_lightning_project"
SHORT = ("--trainer.max_epochs", "2", "--model.width", "8")


@pytest.fixture
def project(bake: Bake, tmp_path: Path) -> Path:
    """A project of one's own, to run and to change."""
    return Path(shutil.copytree(bake(), tmp_path / "project"))


@pytest.fixture(scope="session")
def fitted(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A committed project after its first `fit`, without arguments. Read only, but for what repeats a step."""
    folder = Path(shutil.copytree(bake(), tmp_path_factory.mktemp("fitted") / "project"))
    for arguments in (["init"], ["add", "--all"], ["commit", "--message", "Project"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)
    recipe = (folder / "recipe.yaml").read_bytes()
    result = run(folder, "fit")
    (runs,) = (folder / "runs").iterdir()
    return SimpleNamespace(folder=folder, run=runs, output=result.stdout, log=result.stderr, recipe=recipe)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """300 digits as PNG and JPEG files of 20x24 pixels, one folder for each of three classes."""
    bunch = load_digits(n_class=3)
    for index, (pixels, label) in enumerate(zip(bunch.images[:300], bunch.target, strict=False)):
        folder = tmp_path / "images" / f"digit {label}"
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * 15).astype(np.uint8)).resize((20, 24))
        image.save(folder / f"{index}.{'png' if index % 2 else 'jpg'}")
    return tmp_path / "images"


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `python -m <package> ...` in a project."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "COOKIECUTTER"))}
    env |= {"PYTHONWARNINGS": "default", **environment}
    command = [sys.executable, "-m", NAME, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m <package> ...` in a project, and expect this exit code."""
    process = start(folder, *arguments, **environment)
    output, log = process.communicate(timeout=900)
    assert process.returncode == code, f"{output[-2000:]}\n{log[-4000:]}"
    return subprocess.CompletedProcess(arguments, code, output, log)


def newest(folder: Path) -> Path:
    """The newest run of a project."""
    return max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def client(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def versions(folder: Path) -> list[Any]:
    """All model versions of a project's own store, newest first."""
    return list(client(folder).search_model_versions(f"name = '{NAME}'"))


def edit(path: Path, old: str, new: str) -> None:
    """Change one place of a file, as a user would."""
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new), "utf-8")


@contextlib.contextmanager
def served(command: list[str], folder: Path) -> Iterator[str]:
    """A server on a free port of the loopback interface, given by `{port}`; yields its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    log = (folder.parent / "server.log").open("w")
    command = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(timeout=30)
        log.close()


# One `fit` without arguments


def test_fit_reaches_97_percent_on_the_digits(fitted: SimpleNamespace) -> None:
    metrics = json.loads((fitted.run / "metrics.json").read_text())
    assert metrics["test_acc"] >= 0.97


def test_fit_leaves_these_files(fitted: SimpleNamespace) -> None:
    files = sorted(path.relative_to(fitted.run).as_posix() for path in fitted.run.rglob("*") if path.is_file())
    assert files == [
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "checkpoints/previous.ckpt",
        "environment.txt",
        "export/contract.json",
        "export/model.onnx",
        "metrics.json",
        "mlflow_run_id",
        "recipe.yaml",
        "split.csv",
        "train_batch.png",
    ]


def test_fit_ends_with_a_summary_of_about_ten_lines(fitted: SimpleNamespace) -> None:
    lines = fitted.output[fitted.output.index(f"{NAME}, run ") :].splitlines()
    starts = [line.split("  ")[0] for line in lines if line[0] != " "]
    expected = ["best checkpoint", "weakest classes", "exported", "registered", "next"]
    assert (len(lines) <= 12, starts[1:]) == (True, expected)


def test_fit_checks_before_it_trains(fitted: SimpleNamespace) -> None:
    assert fitted.output.startswith("check digits: 10 classes, data hash ")


def test_fit_says_what_it_computes_in(fitted: SimpleNamespace) -> None:
    assert "precision: 16-mixed needs CUDA, so this run computes in " in fitted.log


def test_fit_does_not_write_to_the_recipe(fitted: SimpleNamespace) -> None:
    assert (fitted.folder / "recipe.yaml").read_bytes() == fitted.recipe


def test_fit_leaves_no_uncommitted_file(fitted: SimpleNamespace) -> None:
    result = subprocess.run(["git", "status", "--porcelain"], cwd=fitted.folder, capture_output=True, text=True)
    assert result.stdout == ""


def test_the_version_names_the_commit_it_was_made_of(fitted: SimpleNamespace) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=fitted.folder, capture_output=True, text=True).stdout
    tags = versions(fitted.folder)[0].tags
    assert (tags["git_commit"], tags["git_dirty"]) == (head.strip(), "False")


def test_the_version_has_the_metrics_of_the_best_checkpoint(fitted: SimpleNamespace) -> None:
    metrics = json.loads((fitted.run / "metrics.json").read_text())
    tags = versions(fitted.folder)[0].tags
    assert {key: repr(value) for key, value in metrics.items() if isinstance(value, float)}.items() <= tags.items()


def test_curves_have_a_point_for_each_epoch(fitted: SimpleNamespace) -> None:
    store = client(fitted.folder)
    run_id = (fitted.run / "mlflow_run_id").read_text()
    epochs = store.get_metric_history(run_id, "epoch")
    counts = {name: len(store.get_metric_history(run_id, name)) for name in ("train_loss", "val_loss", "val_acc")}
    assert set(counts.values()) == {int(max(point.value for point in epochs)) + 1}


def test_the_run_is_finished(fitted: SimpleNamespace) -> None:
    run_id = (fitted.run / "mlflow_run_id").read_text()
    assert client(fitted.folder).get_run(run_id).info.status == "FINISHED"


def test_mlflow_ui_without_arguments_shows_the_model(fitted: SimpleNamespace) -> None:
    with served(["mlflow", "ui"], fitted.folder) as address:
        url = f"{address}/api/2.0/mlflow/registered-models/search"
        models = json.load(urllib.request.urlopen(url))["registered_models"]
    assert [model["name"] for model in models] == [NAME]


def test_readme_s_code_uses_the_export(fitted: SimpleNamespace) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (fitted.folder / "README.md").read_text("utf-8"), flags=re.DOTALL)
    result = subprocess.run([sys.executable, "-c", code], cwd=fitted.run, capture_output=True, text=True)
    assert len(json.loads(result.stdout.replace("'", '"'))) == 4, result.stderr


def test_readme_names_commands_and_options_that_exist(fitted: SimpleNamespace) -> None:
    text = (fitted.folder / "README.md").read_text("utf-8")
    commands = set(re.findall(rf"python -m {NAME} (\w+)", text)) | set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
    options = set(re.findall(r"--(?:data|model|trainer|ckpt)[\w.]+", text))
    presets = [path.stem for path in (fitted.folder / "presets").iterdir()]
    known = [*run(fitted.folder, "--help").stdout.split(), *presets], run(fitted.folder, "fit", "--help").stdout
    assert (commands - set(known[0]), {option for option in options if f"{option} " not in known[1]}) == (set(), set())


# The other commands


@pytest.mark.parametrize("command", ["validate", "test"])
def test_measuring_takes_the_best_checkpoint_of_the_newest_run(fitted: SimpleNamespace, command: str) -> None:
    metrics = json.loads((fitted.run / "metrics.json").read_text())
    value = metrics["val_loss" if command == "validate" else "test_loss"]
    assert str(value)[:10] in run(fitted.folder, command).stdout


def test_predict_writes_a_row_for_each_image(fitted: SimpleNamespace, images: Path) -> None:
    run(fitted.folder, "predict", str(images))
    rows = (fitted.run / "predictions-images.csv").read_text("utf-8").splitlines()
    assert (rows[0], len(rows)) == ("file,class,probability", 301)


def test_export_and_register_again_change_nothing(fitted: SimpleNamespace) -> None:
    before = (fitted.run / "export" / "model.onnx").read_bytes()
    run(fitted.folder, "export", str(fitted.run / "checkpoints" / "best.ckpt"))
    run(fitted.folder, "register")
    assert ((fitted.run / "export" / "model.onnx").read_bytes() == before, len(versions(fitted.folder))) == (True, 1)


def test_a_mistyped_option_is_answered_in_three_lines(fitted: SimpleNamespace) -> None:
    lines = run(fitted.folder, "fit", "--trainer.max_epochz=3", code=2).stderr.splitlines()
    assert lines[-2:] == ["Did you mean --trainer.max_epochs?", f"All options: python -m {NAME} fit --help"]


def test_a_download_without_a_network_ends_in_one_line(project: Path) -> None:
    log = run(project, "fit", "--data.source", "mnist", code=1, https_proxy="http://127.0.0.1:9").stderr
    errors = [line for line in log.splitlines() if line.startswith("error: mnist is not in")]
    assert (len(errors), "Traceback" in log) == (1, False)


# Other ways to train


def test_own_images_are_trained_on_and_predicted(project: Path, images: Path) -> None:
    run(project, "fit", "--data.source", str(images), "--data.image_size", "16", "--data.batch_size", "32", *SHORT)
    run(project, "predict", str(images / "digit 1"))
    contract = json.loads((newest(project) / "export" / "contract.json").read_text("utf-8"))
    rows = (newest(project) / "predictions-digit 1.csv").read_text("utf-8").splitlines()[1:]
    expected = ["digit 0", "digit 1", "digit 2"]
    assert (contract["classes"], {row.split(",")[1] for row in rows} <= set(expected)) == (expected, True)


def test_a_resumed_run_goes_on_in_its_folder_and_its_mlflow_run(project: Path) -> None:
    run(project, "fit", *SHORT)
    last = newest(project) / "checkpoints" / "last.ckpt"
    run(project, "fit", "--ckpt_path", str(last), "--trainer.max_epochs", "4")
    run_id = (newest(project) / "mlflow_run_id").read_text()
    points = client(project).get_metric_history(run_id, "val_loss")
    assert ([point.step for point in points], len(list((project / "runs").iterdir()))) == ([19, 39, 59, 79], 1)


def test_a_run_from_another_folder_lands_in_the_project(project: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run(tmp_path / "elsewhere", "fit", *SHORT, PYTHONPATH=str(project))
    made = [path.name for path in (tmp_path / "elsewhere").iterdir()]
    assert (made, versions(project)[0].version) == ([], 1)


def test_two_processes_train_as_one_run(project: Path) -> None:
    devices = ("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp")
    run(project, "fit", *devices, *SHORT)
    runs = client(project).search_runs([client(project).get_experiment_by_name("My Lightning Project").experiment_id])
    assert ([item.info.status for item in runs], len(versions(project))) == (["FINISHED"], 1)
    rates = client(project).get_metric_history(runs[0].info.run_id, "lr-AdamW/pg1")
    steps = 2 * (1297 // 2 // 64)  # optimizer steps of the run: each process has half of the samples
    expected = 3e-3 * 0.5 * (1 + math.cos(math.pi * (rates[-1].step - 2) / (steps - 2)))  # after 2 steps of warm-up
    assert rates[-1].value == pytest.approx(expected)


def test_two_processes_measure_what_one_measures(fitted: SimpleNamespace) -> None:
    """The 270 samples make batches of unequal size, and unequal shares for the processes."""
    devices = ("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp")
    output = run(fitted.folder, "test", *devices, "--data.batch_size", "32").stdout
    found = {name: float(value) for name, value in re.findall(r"(test_\w+)\W+([\d.]+)", output)}
    metrics = json.loads((fitted.run / "metrics.json").read_text())
    expected = {name: value for name, value in metrics.items() if name.startswith("test_")}
    assert found == pytest.approx(expected, rel=1e-4)


def test_eight_first_runs_at_the_same_moment_all_succeed(project: Path) -> None:
    short = ("--trainer.max_epochs", "1", "--model.width", "8", "--onnx.batch_sizes", "[1]")
    processes = [start(project, "fit", *short, OMP_NUM_THREADS="1") for _ in range(8)]
    logs = [process.communicate(timeout=600)[1] for process in processes]
    failed = [log[-2000:] for process, log in zip(processes, logs, strict=True) if process.returncode]
    assert failed == []
    assert (len(list((project / "runs").iterdir())), len(versions(project))) == (8, 8)


def test_a_tracking_server_receives_it_all(project: Path, tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    with served(["mlflow", "server"], tmp_path / "server") as address:
        run(project, "fit", *SHORT, MLFLOW_TRACKING_URI=address)
        store = MlflowClient(address)
        version = store.get_model_version_by_alias(NAME, "champion")
        epochs = len(store.get_metric_history(version.run_id, "val_loss"))
    assert (epochs, (project / "mlflow.db").exists()) == (2, False)


def test_a_run_without_its_server_is_complete_after_sync_and_register(project: Path, tmp_path: Path) -> None:
    result = run(project, "fit", *SHORT, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    away = "MLflow at http://127.0.0.1:9 does not answer: [Errno 111] Connection refused"
    assert (f"warning: {away}" in result.stdout, f"nothing yet: {away}" in result.stdout) == (True, True)
    (tmp_path / "server").mkdir()
    with served(["mlflow", "server"], tmp_path / "server") as address:
        run(project, "sync", MLFLOW_TRACKING_URI=address)
        run(project, "register", MLFLOW_TRACKING_URI=address)
        store = MlflowClient(address)
        version = store.get_model_version_by_alias(NAME, "champion")
        epochs, info = len(store.get_metric_history(version.run_id, "val_loss")), store.get_run(version.run_id).info
    assert (epochs, info.status, info.run_name) == (2, "FINISHED", newest(project).name)


def test_an_export_that_fails_fails_the_run_and_keeps_the_checkpoint(project: Path) -> None:
    edit(project / NAME / "parity.py", "    float32 = ", "    logits = logits * 1.5\n    float32 = ")
    edit(project / NAME / "cli.py", "        check(self.trainer, self.model, self.datamodule)\n", "")
    log = run(project, "fit", *SHORT, code=1).stderr
    run_id = (newest(project) / "mlflow_run_id").read_text()
    status = client(project).get_run(run_id).info.status
    kept = (newest(project) / "checkpoints" / "best.ckpt").is_file()
    assert (log.splitlines()[-1][:24], status, kept, versions(project)) == (
        "error: ONNX export: logi",
        "FAILED",
        True,
        [],
    )


# Edits that users make


@pytest.mark.parametrize(
    ("leaf", "symbols", "keys"),
    [
        ("check", r'from \.check import|\bcheck = check\b|"check": |\bcheck\(', []),
        ("export", r'from \.export|\bexport = export\b|"export": |OnnxExport|export_summary', ["onnx"]),
        ("registry", r'from \.registry|\bregister = register\b|"register": |Registry|register_best', ["registry"]),
    ],
)
def test_a_leaf_can_be_taken_out(project: Path, leaf: str, symbols: str, keys: list[str]) -> None:
    """Its file, its lines in cli.py and __main__.py, and its part of the recipe."""
    (project / NAME / f"{leaf}.py").unlink()
    for name in ("cli.py", "__main__.py"):
        lines = (project / NAME / name).read_text("utf-8").splitlines(keepends=True)
        (project / NAME / name).write_text("".join(line for line in lines if not re.search(symbols, line)), "utf-8")
    recipe = (project / "recipe.yaml").read_text("utf-8")
    for key in keys:
        recipe = re.sub(rf"^{key}:.*\n(  .*\n)+", "", recipe, flags=re.MULTILINE)
    (project / "recipe.yaml").write_text(recipe, "utf-8")
    run(project, "fit", *SHORT)
    exported = (newest(project) / "export" / "model.onnx").is_file()
    registered = (project / "mlflow.db").is_file() and len(versions(project)) == 1
    assert (exported, registered) == (leaf != "export", leaf == "check")


def test_another_network_is_an_edit_of_model_py(project: Path) -> None:
    text = (project / NAME / "model.py").read_text("utf-8")
    start_, end = text.index("        self.features ="), text.index("class MLP")
    network = (
        "        values = input_spec['shape'][0] * input_spec['shape'][1] * input_spec['shape'][2]\n"
        "        self.layers = nn.Sequential(\n"
        "            nn.Flatten(), nn.Linear(values, 4 * width), nn.ReLU(), nn.Linear(4 * width, num_classes)\n"
        "        )\n\n"
        "    def forward(self, images: Tensor) -> Tensor:\n"
        "        return self.layers(self.normalize(images))\n\n\n"
    )
    (project / NAME / "model.py").write_text(text[:start_] + network + text[end:], "utf-8")
    run(project, "fit", *SHORT)
    assert len(versions(project)) == 1


def test_a_further_metric_is_an_edit_of_metrics_py(project: Path) -> None:
    old = '        metrics["acc"] = MulticlassAccuracy(num_classes, average="micro", **fast)\n'
    edit(
        project / NAME / "metrics.py", old, f'{old}        metrics["top3"] = MulticlassAccuracy(num_classes, top_k=3)\n'
    )
    run(project, "fit", *SHORT)
    assert {"val_top3", "test_top3"} <= versions(project)[0].tags.keys()


def test_another_loss_is_an_edit_of_task_py(project: Path) -> None:
    edit(project / NAME / "task.py", "return losses.mean()", "return ((1 - (-losses).exp()) ** 2 * losses).mean()")
    run(project, "fit", *SHORT)
    assert len(versions(project)) == 1


def test_regression_is_an_edit_of_sources_py_task_py_and_metrics_py(project: Path, images: Path) -> None:
    """The number that a digit shows, as a number."""
    package = project / NAME
    edit(package / "sources.py", "bunch.target.astype(np.int64)", "bunch.target.astype(np.float32)")
    edit(package / "sources.py", "[str(name) for name in bunch.target_names]", "['number']")
    old = "        weight = self.loss_weight"
    edit(package / "task.py", old, f"        return F.mse_loss(logits[:, 0].float(), targets)\n{old}")
    edit(package / "metrics.py", "preds=logits,", "preds=logits[:, 0],")
    old = "        return logits.sigmoid()"
    edit(package / "task.py", old, f"        return logits\n{old}")
    old = '    if task == "multilabel":\n        metrics["acc"]'
    mae = '    if task == "regression":\n        metrics["mae"] = MeanAbsoluteError()\n'
    edit(package / "metrics.py", old, f"{mae}    el{old.strip()}")
    edit(package / "metrics.py", "from torchmetrics import", "from torchmetrics import MeanAbsoluteError,")
    output = run(project, "fit", "--trainer.max_epochs", "10").stdout
    assert " samples, numbers from 0 to 9" in output
    run(project, "predict", str(images / "digit 2"))
    contract = json.loads((newest(project) / "export" / "contract.json").read_text("utf-8"))
    rows = (newest(project) / "predictions-digit 2.csv").read_text("utf-8").splitlines()
    assert (contract["task"], contract["output"]["activation"], rows[0]) == ("regression", "none", "file,number")
    assert float(versions(project)[0].tags["test_mae"]) < 1.5  # always 4.5 would be wrong by 2.5 on average


def test_a_table_is_an_edit_of_data_py_and_model_py(project: Path) -> None:
    """From the file to the registry, and to a CSV of predictions; the recipe loses the options that are of images."""
    for name in ("data.py", "model.py"):
        shutil.copy(Path(__file__).parent / "table" / name, project / NAME / name)
    table = load_breast_cancer(as_frame=True)
    frame = table.frame.assign(target=table.target_names[table.target])
    frame.to_csv(project / "table.csv", index=False)
    lines = (project / "recipe.yaml").read_text("utf-8").splitlines(keepends=True)
    gone = re.compile(r"  (source|group|flip|max_shift|min_area|color_jitter|erasing|mixup|cutmix): ")
    (project / "recipe.yaml").write_text("".join(line for line in lines if not gone.match(line)), "utf-8")
    run(project, "fit", "--data.source", "table.csv", "--trainer.max_epochs", "10")
    run(project, "predict", "table.csv")
    rows = (newest(project) / "predictions-table.csv").read_text("utf-8").splitlines()
    assert (rows[0], len(rows)) == ("file,class,probability", 570)
    assert float(versions(project)[0].tags["test_acc"]) > 0.9  # 0.63 by always saying benign


def test_a_further_augmentation_is_an_edit_of_augment_py(project: Path) -> None:
    run(project, "fit", *SHORT)
    edit(project / NAME / "augment.py", "    return images\n\n\ndef draw", "    return images.flip(-1)\n\n\ndef draw")
    run(project, "fit", *SHORT)
    losses = [version.tags["val_loss"] for version in versions(project)]
    assert len(set(losses)) == 2


def test_a_further_callback_is_a_line_of_the_recipe(project: Path) -> None:
    summary = "{class_path: lightning.pytorch.callbacks.ModelSummary, init_args: {max_depth: 2}}"
    edit(project / "recipe.yaml", "trainer:\n", f"trainer:\n  callbacks: [{summary}]\n")
    assert "network.features" in run(project, "fit", *SHORT).stderr


def test_the_project_s_own_tests_pass(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=1200)
    assert " passed" in result.stdout.splitlines()[-1] and result.returncode == 0, result.stdout[-4000:]
