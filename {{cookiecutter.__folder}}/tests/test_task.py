"""Training: loss, metrics, schedule, checkpoints, reproducibility and resuming."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor
from torch.nn import functional as F

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.optim import cosine
from {{ cookiecutter.package_name }}.resume import ResumePoint
from {{ cookiecutter.package_name }}.task import ClassificationTask


class Watch(L.Callback):
    """Keeps what can be seen at each step of a training: learning rates, gradients, modes."""

    def __init__(self, gradient_scale: float = 1.0) -> None:
        self.gradient_scale = gradient_scale
        self.lrs: list[float] = []
        self.norms: list[float] = []
        self.val_modes: set[bool] = set()
        self.train_modes: set[bool] = set()
        self.left_gradients = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.train_modes |= {module.training for module in pl_module.network.modules()}

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        self.val_modes |= {module.training for module in pl_module.network.modules()}

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        self.left_gradients += sum(p.grad is not None for p in pl_module.parameters())

    def on_after_backward(self, trainer, pl_module) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.mul_(self.gradient_scale)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        gradients = [p.grad for p in pl_module.parameters()]  # those that the optimizer has just used
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())


class Sabotage(L.Callback):
    """Makes the network guess from a given epoch on, so that its validation loss is ln K."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_validation_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch >= self.epoch:
            for parameter in pl_module.network.head.parameters():
                parameter.data.zero_()


class StopAfter(L.Callback):
    """Ends the training after a given number of epochs, before its schedule is through."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


def weights(task: ClassificationTask) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in task.network.state_dict().values()])


@pytest.fixture
def fit(make_trainer: Callable[..., L.Trainer]) -> Callable[..., tuple[ClassificationTask, L.Trainer]]:
    """`fit(seed=1, max_epochs=2, lr=0.1)` trains a new task of that seed on the digits: options of task and Trainer."""

    def run(
        seed: int = 1,
        num_workers: int = 0,
        batch_size: int = 256,
        max_shift: int = 1,
        ckpt_path: Path | None = None,
        task: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[ClassificationTask, L.Trainer]:
        L.seed_everything(seed, workers=True, verbose=False)
        datamodule = DataModule(batch_size=batch_size, max_shift=max_shift, seed=seed, num_workers=num_workers)
        model = ClassificationTask(**{"width": 4, **(task or {})})
        trainer = make_trainer(**{"num_sanity_val_steps": 0, **options})
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
        return model, trainer

    return run


Fit = Callable[..., tuple[ClassificationTask, L.Trainer]]


# Reproducibility


def test_two_runs_with_one_seed_give_equal_weights(fit: Fit) -> None:
    first, second = (weights(fit(seed=3, max_epochs=2)[0]) for _ in range(2))
    assert torch.equal(first, second)


def test_another_seed_gives_other_weights(fit: Fit) -> None:
    first, second = (weights(fit(seed=seed, max_epochs=1)[0]) for seed in (3, 4))
    assert not torch.equal(first, second)


def test_number_of_workers_does_not_change_the_weights(fit: Fit) -> None:
    first, second = (weights(fit(num_workers=count, max_epochs=2)[0]) for count in (0, 2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_run_gives_the_weights_of_one_without_interruption(
    fit: Fit, recipe: dict[str, Any], tmp_path: Path, num_workers: int
) -> None:
    straight, _ = fit(num_workers=num_workers, max_epochs=4)
    last = ResumePoint(dirpath=str(tmp_path), **recipe["last"])
    options = {"max_epochs": 4, "num_workers": num_workers, "enable_checkpointing": True}
    fit(**options, callbacks=[last, StopAfter(2)])
    resumed, _ = fit(**options, callbacks=[last], ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(straight))


def test_resumed_run_without_random_draws_gives_the_weights_of_one_without_interruption(
    fit: Fit, recipe: dict[str, Any], tmp_path: Path
) -> None:
    options = {"max_epochs": 4, "max_shift": 0, "task": {"dropout": 0.0}}
    straight, _ = fit(**options)
    last = ResumePoint(dirpath=str(tmp_path), **recipe["last"])
    fit(**options, enable_checkpointing=True, callbacks=[last, StopAfter(2)])
    resumed, _ = fit(**options, enable_checkpointing=True, callbacks=[last], ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(straight))


# Schedule


def expected_factors(total: int, warmup: int) -> list[float]:
    rise = [(step + 1) / warmup for step in range(warmup)]
    fall = [0.5 * (1 + math.cos(math.pi * step / (total - warmup))) for step in range(total - warmup)]
    return rise + fall


def test_learning_rate_follows_warmup_and_cosine_at_each_step(fit: Fit) -> None:
    watch = Watch()
    fit(max_epochs=4, callbacks=[watch], task={"lr": 0.01, "warmup_fraction": 0.2})
    assert watch.lrs == pytest.approx([0.01 * factor for factor in expected_factors(total=20, warmup=4)])


def test_learning_rate_counts_optimizer_steps_under_accumulation(fit: Fit) -> None:
    watch = Watch()
    fit(max_epochs=4, callbacks=[watch], accumulate_grad_batches=2, task={"lr": 0.01, "warmup_fraction": 0.25})
    steps = expected_factors(total=12, warmup=3)  # an epoch's 5 batches make 3 steps: of 2, of 2, and of the last one
    batches = [step for epoch in range(4) for step in [0, 0, 1, 1, 2] for step in [steps[3 * epoch + step]]]
    assert watch.lrs == pytest.approx([0.01 * factor for factor in batches])


def test_learning_rate_ends_at_0() -> None:
    assert cosine(100, 100, 0.1) == pytest.approx(0)


def test_learning_rate_starts_above_0() -> None:
    assert cosine(0, 100, 0.1) == pytest.approx(0.1)


def test_learning_rate_stays_at_0_past_the_end() -> None:
    assert cosine(150, 100, 0.1) == pytest.approx(0)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_schedule_without_warmup_or_with_nothing_else_stays_within_0_and_1(fraction: float) -> None:
    assert all(0 <= cosine(step, 10, fraction) <= 1 for step in range(12))


@pytest.mark.filterwarnings("ignore:.max_epochs. was not set")
def test_endless_training_is_refused(fit: Fit) -> None:
    with pytest.raises(UserError, match="The cosine schedule needs an end: set trainer.max_epochs"):
        fit(max_epochs=-1)


# Steps


def test_gradients_are_clipped_to_norm_1(fit: Fit) -> None:
    watch = Watch(gradient_scale=1000)
    fit(max_epochs=1, callbacks=[watch])
    assert watch.norms == pytest.approx([1.0] * 5, rel=1e-4)


def test_small_gradients_are_left_as_they_are(fit: Fit) -> None:
    watch = Watch(gradient_scale=1e-3)
    fit(max_epochs=1, callbacks=[watch])
    assert max(watch.norms) < 0.1


def test_gradients_are_none_before_each_backward(fit: Fit) -> None:
    watch = Watch()
    fit(max_epochs=1, callbacks=[watch])
    assert watch.left_gradients == 0


def test_network_is_in_train_mode_in_training_and_in_eval_mode_in_validation(fit: Fit) -> None:
    watch = Watch()
    fit(max_epochs=2, callbacks=[watch])
    assert (watch.train_modes, watch.val_modes) == ({True}, {False})


def test_label_smoothing_is_of_training_alone(digits: DataModule) -> None:
    task = ClassificationTask(label_smoothing=0.5)
    task.adopt(digits)
    logits, targets = torch.tensor([[9.0] + [0.0] * 9]), torch.tensor([0])
    training, validation = (task.train(mode).loss(logits, targets).item() for mode in (True, False))
    assert (training > 1, validation < 0.01) == (True, True)


def test_loss_of_half_precision_logits_is_computed_in_float32(task: ClassificationTask) -> None:
    assert task.loss(torch.zeros(2, 10, dtype=torch.float16), torch.tensor([0, 1])).dtype == torch.float32


def test_prediction_gives_probabilities(task: ClassificationTask, digits: DataModule) -> None:
    probabilities = task.eval().predict_step(digits.splits["val"].__getitems__(list(range(20))), 0)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(20))


# Metrics


@pytest.mark.parametrize("split", ["val", "test"])
def test_loss_and_accuracy_equal_a_plain_computation_over_all_samples(fit: Fit, digits: DataModule, split: str) -> None:
    # 230 and 270 samples: the last batch is smaller. Four epochs: some classes are told apart and others not yet.
    task, trainer = fit(max_epochs=4, batch_size=100, task={"lr": 0.01})
    trainer.test(task, datamodule=trainer.datamodule, verbose=False)
    trainer.validate(task, datamodule=trainer.datamodule, verbose=False) if split == "val" else None
    inputs, targets = digits.splits[split].__getitems__(list(range(len(digits.splits[split]))))
    with torch.no_grad():
        logits = task.eval()(inputs)
    plain = (F.cross_entropy(logits, targets).item(), (logits.argmax(1) == targets).float().mean().item())
    measured = tuple(trainer.callback_metrics[f"{split}_{name}"].item() for name in ("loss", "acc"))
    assert measured == pytest.approx(plain, rel=1e-5)


def test_training_loss_is_the_mean_over_the_epoch(make_trainer: Callable[..., L.Trainer]) -> None:
    datamodule = DataModule(batch_size=256, max_shift=0)
    task = ClassificationTask(width=4, dropout=0.0, lr=0.0)
    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(task, datamodule=datamodule)
    loader = datamodule.train_dataloader()
    losses = [task.train().loss(task(inputs), targets).item() for inputs, targets in loader]
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(sum(losses) / 5, rel=1e-4)


def test_metrics_start_afresh_each_epoch(fit: Fit, digits: DataModule) -> None:
    task, trainer = fit(max_epochs=3)
    inputs, targets = digits.splits["val"].__getitems__(list(range(230)))
    with torch.no_grad():
        last = task.loss(task.eval()(inputs), targets).item()
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(last, rel=1e-5)


# Checkpoints


def test_best_checkpoint_is_the_one_of_the_lowest_val_loss(fit: Fit, recipe: dict[str, Any], tmp_path: Path) -> None:
    best = ModelCheckpoint(dirpath=tmp_path, **recipe["checkpoint"])
    fit(max_epochs=4, enable_checkpointing=True, callbacks=[best, Sabotage(epoch=2)], task={"lr": 0.03})
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["epoch"] == 1


def test_last_checkpoint_is_the_one_of_the_last_epoch(fit: Fit, recipe: dict[str, Any], tmp_path: Path) -> None:
    last = ResumePoint(dirpath=str(tmp_path), **recipe["last"])
    fit(max_epochs=4, enable_checkpointing=True, callbacks=[last, Sabotage(epoch=2)], task={"lr": 0.03})
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["epoch"] == 3


def test_training_stops_when_val_loss_no_longer_improves(fit: Fit, recipe: dict[str, Any]) -> None:
    stopping = EarlyStopping(**{**recipe["early_stopping"], "patience": 2})
    _, trainer = fit(max_epochs=20, callbacks=[stopping, Sabotage(epoch=0)])
    assert trainer.current_epoch == 3


def test_checkpoint_of_an_epoch_holds_the_weights_at_its_end(fit: Fit, recipe: dict[str, Any], tmp_path: Path) -> None:
    last = ResumePoint(dirpath=str(tmp_path), **recipe["last"])
    task, _ = fit(max_epochs=2, enable_checkpointing=True, callbacks=[last])
    loaded = ClassificationTask.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(weights(loaded), weights(task))


def test_checkpoint_holds_whatever_is_needed_to_use_it(trained: SimpleNamespace) -> None:
    content = torch.load(trained.best, weights_only=True)
    parameters = content["hyper_parameters"] | content["datamodule_hyper_parameters"]
    assert {"classes", "input_spec", "fingerprint", "lr", "width", "batch_size", "split_seed"} <= parameters.keys()


def test_checkpoint_holds_class_names_and_input_spec_of_its_data(trained: SimpleNamespace, digits: DataModule) -> None:
    task = ClassificationTask.load_from_checkpoint(trained.best, weights_only=True)
    assert [task.hparams[key] for key in ("classes", "input_spec", "fingerprint")] == [
        digits.classes,
        digits.input_spec,
        digits.fingerprint,
    ]


def test_checkpoint_holds_weights_in_float32_alone(trained: SimpleNamespace) -> None:
    content = torch.load(trained.best, weights_only=True)
    floats = [tensor.dtype for tensor in content["state_dict"].values() if tensor.is_floating_point()]
    assert set(floats) == {torch.float32}


# Guards


def test_network_of_other_classes_is_refused(trained: SimpleNamespace, digits: DataModule) -> None:
    task = ClassificationTask.load_from_checkpoint(trained.best, weights_only=True)
    digits.classes = ["cat", "dog"]
    with pytest.raises(UserError, match=r"trained on .*, the data has multiclass classes \['cat', 'dog'\]"):
        task.adopt(digits)


def test_network_of_another_input_shape_is_refused(trained: SimpleNamespace) -> None:
    task = ClassificationTask.load_from_checkpoint(trained.best, weights_only=True)
    datamodule = DataModule(image_size=16)
    datamodule.setup("fit")
    with pytest.raises(UserError, match=r"inputs \[1, 8, 8\], the data has .* inputs \[1, 16, 16\]"):
        task.adopt(datamodule)


def test_training_on_is_refused_on_another_split(
    trained: SimpleNamespace, make_trainer: Callable[..., L.Trainer]
) -> None:
    task = ClassificationTask.load_from_checkpoint(trained.best, weights_only=True)
    with pytest.raises(UserError, match="Bring back the same files and split, or train anew"):
        make_trainer(max_epochs=1).fit(task, datamodule=DataModule(split_seed=7))


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checkpoint_of_mixed_precision_holds_the_state_of_the_gradient_scaler(fit: Fit, tmp_path: Path) -> None:
    last = ModelCheckpoint(dirpath=tmp_path, filename="last")
    fit(max_epochs=2, accelerator="cuda", precision="16-mixed", enable_checkpointing=True, callbacks=[last])
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert content["MixedPrecision"]["scale"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_runs_on_a_gpu_with_one_seed_give_equal_weights(fit: Fit) -> None:
    options = {"max_epochs": 2, "accelerator": "cuda", "precision": "16-mixed"}
    first, second = (weights(fit(**options)[0]).cpu() for _ in range(2))
    assert torch.equal(first, second)


# Options


@pytest.mark.parametrize(("option", "value"), [("width", 0), ("dropout", 1.5), ("lr", -0.1), ("warmup_fraction", 2.0)])
def test_option_outside_its_range_is_refused(digits: DataModule, option: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"model\.{option} is {value}, expected .* Change --model\.{option}"):
        ClassificationTask(**{option: value}).adopt(digits)


# Several labels, weights of classes, mixed samples


def make_several() -> ClassificationTask:
    spec = {"name": "images", "shape": [1, 8, 8], "dtype": "uint8", "mean": [0.3], "std": [0.4]}
    return ClassificationTask(width=4, task="multilabel", classes=["wet", "furry", "old"], input_spec=spec)


def test_loss_of_several_labels_is_binary_cross_entropy_on_logits() -> None:
    logits, targets = torch.randn(5, 3), torch.randint(0, 2, (5, 3)).float()
    p = logits.sigmoid()
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).mean()
    assert make_several().eval().loss(logits, targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_untrained_loss_of_several_labels_is_ln_2() -> None:
    assert make_several().eval().loss(torch.zeros(5, 3), torch.zeros(5, 3)).item() == pytest.approx(math.log(2))


def test_prediction_of_several_labels_gives_a_probability_for_each() -> None:
    task = make_several().eval()
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert torch.allclose(task.predict_step((images, torch.zeros(4)), 0), task(images).sigmoid())


def test_metrics_of_several_labels_equal_a_plain_computation() -> None:
    task = make_several().eval()
    logits, targets = torch.randn(50, 3), torch.randint(0, 2, (50, 3)).float()
    metrics = task.make_metrics("val")
    for rows in (slice(0, 32), slice(32, 50)):
        task.measure(metrics, logits[rows], targets[rows])
    marks, hits = logits > 0, (logits > 0) & (targets == 1)
    f1 = 2 * hits.sum(0) / (marks.sum(0) + targets.sum(0))
    expected = {"val_acc": float((marks == targets).float().mean()), "val_f1": float(f1.mean())}
    expected["val_loss"] = float(task.loss(logits, targets))
    values = metrics.compute()
    assert values.pop("val_acc_per_class").tolist() == pytest.approx((marks == targets).float().mean(0).tolist())
    found = {key: float(value) for key, value in values.items()}
    assert found.pop("val_auroc") == pytest.approx(roc_auc_score(targets, logits.sigmoid()), abs=0.01)
    assert found == pytest.approx(expected, rel=1e-5)


def test_metrics_of_one_class_equal_a_plain_computation(task: ClassificationTask) -> None:
    logits, targets = 2 * torch.randn(500, 10), torch.randint(0, 10, (500,))
    logits[range(500), targets] += 1
    metrics = task.make_metrics("val")
    for rows in (slice(0, 300), slice(300, 500)):
        task.measure(metrics, logits[rows], targets[rows])
    found = metrics.compute()
    (confidence, guess), probabilities = logits.softmax(dim=1).max(dim=1), logits.softmax(dim=1)
    gaps = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            gaps += abs(float((guess == targets)[inside].float().mean() - confidence[inside].mean())) * int(
                inside.sum()
            )
    recalls = [float((guess == targets)[targets == row].float().mean()) for row in range(10)]
    assert found["val_acc_per_class"].tolist() == pytest.approx(recalls)
    assert found["val_f1"] == pytest.approx(f1_score(targets, guess, average="macro"), abs=1e-5)
    assert found["val_auroc"] == pytest.approx(roc_auc_score(targets, probabilities, multi_class="ovr"), abs=0.01)
    assert found["val_ece"] == pytest.approx(gaps / 500, abs=1e-5)


def test_metrics_take_little_memory_in_deterministic_mode(task: ClassificationTask) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.use_deterministic_algorithms(True)
    try:
        task.measure(task.make_metrics("val"), torch.randn(512, 10), torch.randint(0, 10, (512,)))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # a GiB


# What stops a run, and what makes no difference


class Broken(ClassificationTask):
    """Its loss becomes infinite in the second epoch. Keeps its newest inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.inputs = inputs
        return super().forward(inputs)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        broken = self.training and self.current_epoch == 1 and self.trainer.global_step == 7
        return super().loss(logits, targets) * (float("inf") if broken else 1.0)


def test_loss_that_is_not_finite_stops_the_run_at_its_batch(
    make_trainer: Callable[..., L.Trainer], tmp_path: Path, recipe: dict[str, Any]
) -> None:
    best = ModelCheckpoint(dirpath=tmp_path, **recipe["checkpoint"])
    task, trainer = Broken(width=2), make_trainer(max_epochs=3, callbacks=[best], enable_checkpointing=True)
    with pytest.raises(UserError, match=r"The loss is inf in epoch 2, batch 2, step 7\. Lower model\.lr"):
        trainer.fit(task, datamodule=DataModule(batch_size=256))
    weights = torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"]
    assert trainer.global_step == 7 and all(torch.isfinite(value).all() for value in weights.values())
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())  # no step was taken


def test_the_samples_of_a_batch_that_breaks_are_named(make_trainer: Callable[..., L.Trainer]) -> None:
    task, trainer, datamodule = Broken(width=2), make_trainer(max_epochs=3), DataModule(batch_size=256, max_shift=0)
    with pytest.raises(UserError, match=r"look at the samples (sample \d+, ){4}sample \d+ \.\.\.") as caught:
        trainer.fit(task, datamodule=datamodule)
    rows = [int(number) for number in re.findall(r"sample (\d+)", str(caught.value))]
    split = datamodule.splits["train"]
    assert torch.equal(split.images[rows].permute(0, 3, 1, 2), task.inputs[:5])


@pytest.mark.filterwarnings("ignore")
def test_a_validation_loss_that_is_not_finite_stops_the_run(
    make_trainer: Callable[..., L.Trainer], tmp_path: Path, recipe: dict[str, Any]
) -> None:
    class Invalid(ClassificationTask):
        def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
            broken = not self.training and self.current_epoch == 1
            return super().loss(logits, targets) * (float("nan") if broken else 1.0)

    best = ModelCheckpoint(dirpath=tmp_path, **recipe["checkpoint"])
    trainer = make_trainer(max_epochs=3, callbacks=[best], enable_checkpointing=True)
    with pytest.raises(UserError, match="val_loss is nan in epoch 2, step 10"):
        trainer.fit(Invalid(width=2), datamodule=DataModule(batch_size=256))
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["epoch"] == 0


def test_accumulated_batches_give_the_weights_of_a_large_batch(make_trainer: Callable[..., L.Trainer]) -> None:
    weights = []
    for batch_size, accumulate in ((256, 1), (128, 2)):
        torch.manual_seed(1)
        task = ClassificationTask(backbone="mlp", width=2, lr=0.01)
        trainer = make_trainer(max_epochs=2, accumulate_grad_batches=accumulate)
        trainer.fit(task, datamodule=DataModule(batch_size=batch_size, max_shift=0))
        weights.append(torch.cat([value.flatten() for value in task.network.parameters()]))
    assert torch.allclose(weights[0], weights[1], atol=1e-5)


def test_a_compiled_network_has_the_same_checkpoint(digits: DataModule, make_trainer: Callable[..., L.Trainer]) -> None:
    tasks = [ClassificationTask(width=2, compile=value) for value in (True, False)]
    for task in tasks:
        task.adopt(digits)
    assert tasks[0].network._compiled_call_impl is not None and tasks[1].network._compiled_call_impl is None
    tasks[1].load_state_dict(tasks[0].state_dict())
    assert tasks[0].state_dict().keys() == tasks[1].state_dict().keys()


def weighted(task: ClassificationTask, choice: str | list[float]) -> ClassificationTask:
    return ClassificationTask(**{**task.hparams, "class_weights": choice})


def test_class_weights_scale_the_loss_of_their_class_in_training(task: ClassificationTask) -> None:
    other = weighted(task, [3.0] + [1.0] * 9)
    logits, targets = torch.randn(6, 10), torch.tensor([0, 1, 2, 3, 4, 5])
    one, two = (F.cross_entropy(logits[rows], targets[rows]) for rows in (slice(0, 1), slice(1, 6)))
    assert other.train().loss(logits, targets).item() == pytest.approx((3 * one + 5 * two).item() / 6, rel=1e-5)


def test_class_weights_leave_the_validation_loss_as_it_is(task: ClassificationTask) -> None:
    logits, targets = torch.randn(6, 10), torch.arange(6)
    losses = {choice.eval().loss(logits, targets).item() for choice in (task, weighted(task, [3.0] + [1.0] * 9))}
    assert len(losses) == 1


def test_automatic_class_weights_are_those_of_the_data(task: ClassificationTask, digits: DataModule) -> None:
    assert weighted(task, "auto").loss_weight.tolist() == pytest.approx(digits.balance)


def test_class_weights_of_several_labels_weigh_the_samples_that_have_them() -> None:
    task = ClassificationTask(**{**make_several().hparams, "class_weights": [5.0, 1.0, 1.0]})
    targets = torch.tensor([[1.0, 0.0, 0.0]])
    assert task.train().loss(torch.zeros(1, 3), targets).item() == pytest.approx((5 + 1 + 1) / 3 * math.log(2))


@pytest.mark.parametrize("choice", ["balanced", [1.0], [1.0] * 9 + [0.0]])
def test_class_weights_that_do_not_fit_are_refused(task: ClassificationTask, choice: str | list[float]) -> None:
    with pytest.raises(UserError, match="model.class_weights is .*; expected auto, none or 10 numbers above 0"):
        weighted(task, choice)


def test_class_weights_are_no_part_of_the_weights_of_the_network(task: ClassificationTask) -> None:
    assert weighted(task, "auto").state_dict().keys() == task.state_dict().keys()


def test_mixed_targets_give_the_mixture_of_the_losses(task: ClassificationTask) -> None:
    logits = torch.randn(1, 10)
    shares = torch.zeros(1, 10)
    shares[0, 2], shares[0, 7] = 0.3, 0.7
    parts = [F.cross_entropy(logits, torch.tensor([label])) for label in (2, 7)]
    assert task.loss(logits, shares).item() == pytest.approx((0.3 * parts[0] + 0.7 * parts[1]).item(), rel=1e-5)


def test_accuracy_of_a_mixed_sample_is_that_of_its_larger_share(task: ClassificationTask) -> None:
    metrics = task.make_metrics("train")
    task.measure(metrics, torch.eye(10)[[7, 2]], torch.tensor([[0.0, 0, 0.3, 0, 0, 0, 0, 0.7, 0, 0]] * 2))
    assert metrics.compute()["train_acc"] == 0.5


@pytest.mark.parametrize("option", ["mixup", "cutmix"])
def test_training_with_mixed_samples_gets_soft_targets(option: str, make_trainer: Callable[..., L.Trainer]) -> None:
    seen: list[Tensor] = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            seen.append(batch[1])

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
            seen.append(batch[1])

    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[Keep()])
    trainer.fit(ClassificationTask(width=1), datamodule=DataModule(batch_size=256, **{option: 1.0}))
    assert (seen[0].shape, seen[0].dtype, seen[-1].dtype) == ((256, 10), torch.float32, torch.int64)
    assert float((seen[0].amax(dim=1) < 1).float().mean()) > 0.5
