"""The network and its parameter groups."""

import math

import pytest
import torch
from torch import Tensor

from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.model import Network, Normalize
from {{ cookiecutter.package_name }}.optim import parameter_groups
from {{ cookiecutter.package_name }}.task import ClassificationTask

GROUPS = {"lr": 1.0, "backbone_lr_factor": 1.0, "layer_decay": 1.0, "weight_decay": 0.1}


@pytest.fixture
def images(digits: DataModule) -> Tensor:
    """64 images of the training split, raw."""
    return digits.splits["train"].__getitems__(list(range(64)))[0]


def test_untrained_loss_is_that_of_guessing(task: ClassificationTask, digits: DataModule) -> None:
    inputs, targets = digits.splits["train"].__getitems__(list(range(512)))
    loss = task.loss(task(inputs), targets).item()
    assert loss == pytest.approx(math.log(10), abs=0.25)


def test_one_batch_can_be_memorised(digits: DataModule) -> None:
    torch.manual_seed(0)
    task = ClassificationTask(width=8, dropout=0.0)
    task.adopt(digits)
    inputs, targets = digits.splits["train"].__getitems__(list(range(32)))
    optimizer = torch.optim.AdamW(task.network.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(task(inputs), targets).backward()
        optimizer.step()
    assert task.loss(task(inputs), targets).item() < 0.05


def test_every_parameter_gets_a_gradient(task: ClassificationTask, images: Tensor) -> None:
    task(images).square().sum().backward()
    assert [name for name, p in task.network.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_logits_are_float32_of_shape_batch_by_classes(task: ClassificationTask, images: Tensor) -> None:
    logits = task(images)
    assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (64, 10))


def test_logits_are_no_probabilities(task: ClassificationTask, images: Tensor) -> None:
    assert task(images).min() < 0


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (3, 13, 17), (1, 64, 64)])
def test_network_takes_images_of_any_size_from_8_up(shape: tuple[int, int, int]) -> None:
    spec = {"shape": list(shape), "mean": [0.5] * shape[0], "std": [0.2] * shape[0]}
    network = Network(spec, num_classes=3, width=2, dropout=0.0).eval()
    assert network(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, 3)


def test_images_of_a_batch_do_not_influence_each_other_in_eval_mode(task: ClassificationTask, images: Tensor) -> None:
    task.eval()
    alone = torch.cat([task(image[None]) for image in images])
    torch.testing.assert_close(task(images), alone)


def test_normalized_training_images_have_mean_0_and_deviation_1(digits: DataModule) -> None:
    split = digits.splits["train"]
    normalize = Normalize(digits.input_spec["mean"], digits.input_spec["std"])
    normalized = normalize(split.images[split.rows])
    assert (normalized.mean().item(), normalized.std().item()) == pytest.approx((0, 1), abs=1e-4)


def test_each_channel_is_normalized_by_its_own_statistics() -> None:
    images = torch.tensor([51, 102, 204], dtype=torch.uint8).view(1, 3, 1, 1)
    normalized = Normalize([0.2, 0.2, 0.2], [1.0, 0.5, 0.25])(images)
    torch.testing.assert_close(normalized.flatten(), torch.tensor([0.0, 0.4, 2.4]))


def test_normalization_is_part_of_the_network(task: ClassificationTask) -> None:
    assert "normalize.channel_mean" in task.network.state_dict()


def test_every_parameter_is_in_one_decay_group(task: ClassificationTask) -> None:
    grouped = [id(p) for group in parameter_groups(task.network, GROUPS) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in task.network.parameters())


def test_kernels_and_matrices_alone_decay(task: ClassificationTask) -> None:
    decay = {id(p): group["weight_decay"] for group in parameter_groups(task.network, GROUPS) for p in group["params"]}
    decaying = {name for name, p in task.network.named_parameters() if decay[id(p)] > 0}
    convolutions = {f"features.{index}.0.weight" for index in range(4)}
    assert decaying == convolutions | {"head.1.weight"}


def test_frozen_parameters_are_left_to_no_optimizer(task: ClassificationTask) -> None:
    task.network.features.requires_grad_(False)
    grouped = [p for group in parameter_groups(task.network, GROUPS) for p in group["params"]]
    assert len(grouped) == len(list(task.network.head.parameters()))
