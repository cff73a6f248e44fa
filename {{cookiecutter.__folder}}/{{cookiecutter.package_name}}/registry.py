"""MLflow registry: one model version for each proven export, tied to its data, metrics and code, and its promotion."""

import importlib.metadata
import json
import math
import os
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning import Callback, LightningDataModule, LightningModule, Trainer

from . import PACKAGE, ROOT, UserError
from .images import file_hash
from .runs import evaluate, run_folder
from .store import StoreAway, StoreError, existing_is_fine
from .tracking import KEPT, MLflowRun

REQUIREMENTS = ("onnxruntime", "onnx", "numpy")  # of the registered file


class Registry(Callback):
    """Registers the exported model; `@candidate` is the newest version, `@champion` the best on the same data.

    Args:
        enabled: Whether `fit` registers; the `register` command always does.
        model_name: Name of the registered model; by default the package's.
        monitor: Metric, of the registered checkpoint itself, by which versions are compared.
        mode: `min` or `max`: whether less or more of it is better.
        min_delta: A new version must be better than the champion by more than this.
    """

    def __init__(
        self,
        enabled: bool = True,
        model_name: str | None = None,
        monitor: str = "val_loss",
        mode: str = "min",
        min_delta: float = 0.0,
    ) -> None:
        self.enabled, self.model_name = enabled, model_name or PACKAGE.name
        self.monitor, self.mode, self.min_delta = monitor, mode, min_delta

    def rehearse(self, trainer: Trainer, task: LightningModule, datamodule: LightningDataModule) -> str:
        """Make sure that the store answers and takes the model's name, as registration will need it."""
        if not self.enabled or not isinstance(trainer.logger, MLflowRun):
            return "registry off"
        try:
            with trainer.logger.asking() as client:
                champion = self.champion(client)
                with existing_is_fine():
                    client.create_registered_model(self.model_name)
        except StoreAway as error:
            return f"warning: {error} {KEPT}"
        return f"registry answers; champion so far: {f'version {champion.version}' if champion else 'none'}"

    def run(self, run: MLflowRun, checkpoint: Path, metrics: dict[str, float]) -> str:
        """Register the export that lies beside a checkpoint, in the MLflow run that made it; doing it again finds the
        same version. Returns which version that is, the aliases that point to it, and why.

        Raises:
            UserError: There is no export of this checkpoint, or its metrics through ONNX are not the checkpoint's.
        """
        folder = run_folder(checkpoint) / "export"
        file = folder / "contract.json"
        contract: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        if contract.get("checkpoint_sha256") != file_hash(checkpoint):
            hint = f"Run: python -m {PACKAGE.name} export {checkpoint}"
            raise UserError(f"{folder} holds no export of {checkpoint}. {hint}")
        if contract["onnx_sha256"] != file_hash(folder / "model.onnx"):
            raise UserError(f"{folder / 'model.onnx'} was changed after it was proven. Export {checkpoint} again.")
        for name, value in contract["parity"]["metrics"].items():
            # Loose: the checkpoint was validated in the training precision, the export computes in float32.
            if not math.isclose(value, metrics[name], rel_tol=0.05, abs_tol=0.01):
                raise UserError(f"{name} is {metrics[name]:.4g}, but {value:.4g} through ONNX: nothing is registered.")
        # MLflow knows neither find-or-create nor compare-and-set, so processes of this project take turns.
        with FileLock(ROOT / ".registry.lock"):
            run.send(patient=True)  # a version takes over what is known of the run
            with run.asking(patient=True) as client:
                versions = client.search_model_versions(f"run_id = '{run.run_id}'")
                same = [item for item in versions if item.tags.get("onnx_sha256") == contract["onnx_sha256"]]
                same = [item for item in same if item.name == self.model_name]
                return self.promote(client, same[0] if same else self.create(run, versions, folder, contract, metrics))

    def create(
        self, run: MLflowRun, versions: list[Any], folder: Path, contract: dict[str, Any], metrics: dict[str, float]
    ) -> Any:
        """A new version, and what is known of it. `versions` are those that this run has already."""
        import mlflow

        client, sha, taken = run.experiment, contract["onnx_sha256"], {item.source for item in versions}
        model = None
        for item in client.search_logged_models([run.experiment_id], f"source_run_id = '{run.run_id}'"):
            if "onnx_sha256" in item.tags and item.model_uri not in taken:  # left by a process that was killed
                if model is None and (item.status, item.tags["onnx_sha256"]) == ("READY", sha):
                    model = item
                else:
                    client.delete_logged_model(item.model_id)
        keys = ("p50_ms", "p99_ms", "peak_memory_mb", "num_threads")
        latency = {f"onnx_batch{row['batch_size']}_{key}": row[key] for row in contract["latency"] for key in keys}
        run_tags = client.get_run(run.run_id).data.tags
        tags = {
            **{key: value for key, value in run_tags.items() if not key.startswith("mlflow.")},
            **{key: contract[key] for key in ("data_hash", "split_hash", "onnx_sha256", "checkpoint_sha256")},
            **{key: repr(value) for key, value in {**metrics, **latency}.items()},
            "parity_max_abs_difference": repr(contract["parity"]["max_abs_difference"]),
        }
        with mlflow.start_run(run_id=run.run_id):
            model = model or self.log_model(folder, contract)
            best = {f"best_{name}": value for name, value in metrics.items()}
            self.log_facts(model, folder, contract, best | latency)
        return mlflow.register_model(model.model_uri, self.model_name, tags=tags)

    def log_model(self, folder: Path, contract: dict[str, Any]) -> Any:
        """ONNX and plain JSON (no pickle), signature, pinned requirements."""
        import mlflow
        import numpy as np
        import onnx
        from mlflow.models import ModelSignature
        from mlflow.types import Schema, TensorSpec

        def schema(spec: dict[str, Any]) -> Schema:
            return Schema([TensorSpec(np.dtype(spec["dtype"]), (-1, *spec["shape"][1:]), spec["name"])])

        return mlflow.onnx.log_model(
            onnx.load(str(folder / "model.onnx")),
            name="model",
            signature=ModelSignature(schema(contract["input"]), schema(contract["output"])),
            save_as_external_data=False,
            # Exact pins, or MLflow would start a process that imports the model to find them.
            pip_requirements=[f"{name}=={importlib.metadata.version(name)}" for name in REQUIREMENTS],
            onnx_execution_providers=["CPUExecutionProvider"],
            metadata={"contract": contract},
            tags={"onnx_sha256": contract["onnx_sha256"]},
        )

    def log_facts(self, model: Any, folder: Path, contract: dict[str, Any], numbers: dict[str, float]) -> None:
        """Tie a logged model to its data and metrics, and keep its files with the run."""
        import mlflow
        from mlflow.data.code_dataset_source import CodeDatasetSource
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import LoggedModelInput

        data = MetaDataset(  # type: ignore[abstract] # mlflow does not define `profile` for it
            CodeDatasetSource({}), name="data", digest=contract["data_hash"][:32]
        )
        if not {item.key for item in model.metrics or []} & numbers.keys():  # or a killed process has done it
            mlflow.log_input(data, context="training", model=LoggedModelInput(model.model_id))
            mlflow.log_metrics(numbers, model_id=model.model_id, dataset=data)
        mlflow.log_artifacts(str(folder), "export")

    def promote(self, client: Any, version: Any) -> str:
        """Point `@candidate` at the version, and `@champion` if it beats the champion on the same data and split."""
        champion = self.champion(client)
        if champion and str(champion.version) == str(version.version):  # registered before
            return f"{self.model_name} version {version.version} is @champion: {champion.tags['promotion']}"
        better, reason = self.compare(version, champion)
        aliases = ["candidate", "champion"] if better else ["candidate"]
        client.set_model_version_tag(self.model_name, version.version, "promotion", reason)
        for alias in aliases:
            client.set_registered_model_alias(self.model_name, alias, version.version)
        return f"{self.model_name} version {version.version} as {' and '.join(f'@{a}' for a in aliases)}: {reason}"

    def champion(self, client: Any) -> Any:
        """The version that `@champion` points to, or None."""
        from mlflow import MlflowException

        try:
            return client.get_model_version_by_alias(self.model_name, "champion")
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # no model, or no such alias
                return None
            raise

    def compare(self, version: Any, champion: Any) -> tuple[bool, str]:
        """Whether the version is to be champion, and why."""
        new = float(version.tags.get(self.monitor, "nan"))
        if not math.isfinite(new):
            return False, f"{self.monitor} is {new}"
        if champion is None:
            return True, "the first version"
        for key in ("data_hash", "split_hash"):
            if champion.tags.get(key) != version.tags.get(key):
                return False, f"the champion, version {champion.version}, was measured on another {key}"
        old = float(champion.tags.get(self.monitor, "nan"))
        better = (old - new if self.mode == "min" else new - old) > self.min_delta
        verdict = "beats" if better else "does not beat"
        return better, f"{self.monitor} {new:.5g} {verdict} {old:.5g} of version {champion.version}"


def register_best(trainer: Trainer, checkpoint: Path, metrics: dict[str, float]) -> list[str]:
    """Register after `fit`, where that is wanted and there is a run to tie it to; one line says what came of it."""
    registry = next(callback for callback in trainer.callbacks if isinstance(callback, Registry))
    if not registry.enabled or not isinstance(trainer.logger, MLflowRun):
        return ["registered       nothing: registry.enabled or trainer.logger is false"]
    if not (run_folder(checkpoint) / "export" / "contract.json").is_file():
        return ["registered       nothing: there is no export (onnx.enabled is false)"]
    try:
        return [f"registered       {registry.run(trainer.logger, checkpoint, metrics)}"]
    except StoreError as error:
        later = f"python -m {PACKAGE.name} register {os.path.relpath(checkpoint)}"
        return [f"registered       nothing yet: {error}", f"                 later: {later}"]


def register(
    trainer: Trainer, model: LightningModule, datamodule: LightningDataModule, ckpt_path: str | None = None
) -> None:
    """Register a checkpoint's export as a model version, and promote it if it is the best on its data.

    Args:
        ckpt_path: The checkpoint; by default the best one of the newest run.
    """
    assert ckpt_path is not None  # the command line fills it in
    run = trainer.logger
    assert isinstance(run, MLflowRun)
    registry = next(callback for callback in trainer.callbacks if isinstance(callback, Registry))
    print("registered", registry.run(run, Path(ckpt_path), evaluate(trainer, model, datamodule, ckpt_path)))
    run.finalize("success")
