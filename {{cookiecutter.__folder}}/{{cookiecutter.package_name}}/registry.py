"""MLflow registry: one model version for each proven export, tied to its data, metrics and code, and its promotion."""

import importlib.metadata
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from filelock import FileLock

from . import PACKAGE, ROOT, UserError
from .images import file_hash
from .runs import evaluate
from .tracking import MLflowRun, run_facts


@dataclass(frozen=True)
class Registration:
    """What became of an export: the version it is, the aliases that now point to it, and why."""

    name: str
    version: str
    aliases: list[str]
    reason: str


class Registry(L.Callback):
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

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note on the run, before training, which code, machine and data it is made of."""
        for logger in trainer.loggers:
            if isinstance(logger, MLflowRun):
                classes = json.dumps(pl_module.hparams["classes"], ensure_ascii=False)
                logger.log_tags({**run_facts(), **pl_module.hparams["fingerprint"], "classes": classes})

    def run(self, run: MLflowRun, checkpoint: Path, metrics: dict[str, float]) -> Registration:
        """Register the export that lies beside a checkpoint; doing it again finds the same version.

        Args:
            run: The MLflow run that made the checkpoint.
            checkpoint: The exported checkpoint.
            metrics: Validation and test metrics of this very checkpoint.

        Raises:
            UserError: There is no export of this checkpoint, or its metrics through ONNX are not the checkpoint's.
        """
        folder = checkpoint.parent.parent / "export"
        contract_path = folder / "contract.json"
        contract = json.loads(contract_path.read_text("utf-8")) if contract_path.is_file() else {}
        if contract.get("checkpoint_sha256") != file_hash(checkpoint):
            raise UserError(
                f"{folder} holds no export of {checkpoint.name}. Run: python -m {PACKAGE.name} export {checkpoint}"
            )
        if contract["onnx_sha256"] != file_hash(folder / "model.onnx"):
            raise UserError(f"{folder / 'model.onnx'} was changed after it was proven. Export {checkpoint} again.")
        for name, value in contract["parity"]["metrics"].items():
            # Loose: the checkpoint was validated in the training precision, the export computes in float32.
            if not math.isclose(value, metrics[name], rel_tol=0.05, abs_tol=0.01):
                raise UserError(
                    f"{name} is {metrics[name]:.4g} for the checkpoint and {value:.4g} for its export: not registered."
                )
        client = run.experiment
        version = self.find(client, run.version, contract["onnx_sha256"])
        if version is None:
            version = self.create(client, run.version, folder, contract, metrics)
        with FileLock(ROOT / ".promotion.lock"):  # MLflow's aliases know no compare-and-set
            return self.promote(client, version)

    def find(self, client: Any, run_id: str, onnx_sha256: str) -> Any:
        """The version that this run's export already has, or None."""
        versions = client.search_model_versions(f"name = '{self.model_name}'")
        same = (item for item in versions if item.run_id == run_id and item.tags.get("onnx_sha256") == onnx_sha256)
        return next(same, None)

    def create(
        self, client: Any, run_id: str, folder: Path, contract: dict[str, Any], metrics: dict[str, float]
    ) -> Any:
        """A new version: ONNX and plain JSON (no pickle), signature, pinned requirements, and what is known of it."""
        import mlflow
        import numpy as np
        import onnx
        from mlflow.data.code_dataset_source import CodeDatasetSource
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import LoggedModelInput
        from mlflow.models import ModelSignature
        from mlflow.types import Schema, TensorSpec

        def schema(spec: dict[str, Any]) -> Schema:
            return Schema([TensorSpec(np.dtype(spec["dtype"]), (-1, *spec["shape"][1:]), spec["name"])])

        run_tags = client.get_run(run_id).data.tags
        latency = {
            f"onnx_b{row['batch_size']}_{key}": row[key]
            for row in contract["latency"]
            for key in ("p50_ms", "p99_ms", "peak_memory_mb", "num_threads")
        }
        tags = {
            **{key: value for key, value in run_tags.items() if not key.startswith("mlflow.")},
            **{key: contract[key] for key in ("data_hash", "split_hash", "onnx_sha256", "checkpoint_sha256")},
            **{key: repr(value) for key, value in {**metrics, **latency}.items()},
            "parity_max_abs_difference": repr(contract["parity"]["max_abs_difference"]),
        }
        signature = ModelSignature(schema(contract["input"]), schema(contract["output"]))
        data = MetaDataset(CodeDatasetSource({}), name="data", digest=contract["data_hash"][:32])
        with mlflow.start_run(run_id=run_id):
            info = mlflow.onnx.log_model(
                onnx.load(str(folder / "model.onnx")),
                name="model",
                signature=signature,
                save_as_external_data=False,
                # One exact pin each, or MLflow starts a process that imports the model, and another that asks the index.
                pip_requirements=[
                    f"{name}=={importlib.metadata.version(name)}" for name in ("onnxruntime", "onnx", "numpy")
                ],
                onnx_execution_providers=["CPUExecutionProvider"],
                metadata={"contract": contract},
            )
            mlflow.log_input(data, context="training", model=LoggedModelInput(info.model_id))
            mlflow.log_metrics(
                {f"best_{key}": value for key, value in metrics.items()} | latency, model_id=info.model_id, dataset=data
            )
            mlflow.log_artifacts(str(folder), "export")
        return mlflow.register_model(info.model_uri, self.model_name, tags=tags)

    def promote(self, client: Any, version: Any) -> Registration:
        """Point `@candidate` at the version, and `@champion` if it beats the champion on the same data and split."""
        champion = self.champion(client)
        better, reason = self.compare(version, champion)
        aliases = ["candidate", "champion"] if better else ["candidate"]
        for alias in aliases:
            client.set_registered_model_alias(self.model_name, alias, version.version)
        client.set_model_version_tag(self.model_name, version.version, "promotion", reason)
        return Registration(self.model_name, str(version.version), aliases, reason)

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
        if str(champion.version) == str(version.version):
            return True, "already the champion"
        for key in ("data_hash", "split_hash"):
            if champion.tags.get(key) != version.tags.get(key):
                return False, f"the champion, version {champion.version}, was measured on another {key}"
        old = float(champion.tags.get(self.monitor, "nan"))
        gain = old - new if self.mode == "min" else new - old
        verdict = "beats" if gain > self.min_delta else "does not beat"
        return gain > self.min_delta, f"{self.monitor} {new:.5g} {verdict} {old:.5g} of version {champion.version}"


def register_best(trainer: L.Trainer, checkpoint: Path, metrics: dict[str, float]) -> list[str]:
    """Register after `fit`, where that is wanted and there is a run and an export; one line that says what came of it."""
    registry = next(callback for callback in trainer.callbacks if isinstance(callback, Registry))
    if not registry.enabled or not isinstance(trainer.logger, MLflowRun):
        return ["registered       nothing (registry.enabled or trainer.logger is false)"]
    done = registry.run(trainer.logger, checkpoint, metrics)
    aliases = ", ".join(f"@{alias}" for alias in done.aliases)
    return [f"registered       {done.name} version {done.version} as {aliases}: {done.reason}"]


def register(
    trainer: L.Trainer, model: L.LightningModule, datamodule: L.LightningDataModule, ckpt_path: str | None = None
) -> None:
    """Register a checkpoint's export as a model version, and promote it if it is the best on its data.

    Args:
        ckpt_path: The checkpoint; by default the best one of the newest run.
    """
    assert ckpt_path is not None  # the command line fills it in
    metrics = evaluate(trainer, model, datamodule, ckpt_path)
    print("\n".join(register_best(trainer, Path(ckpt_path), metrics)))
