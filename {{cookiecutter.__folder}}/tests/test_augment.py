"""Random changes of training batches: what each does, and that every sample has its own draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from {{ cookiecutter.package_name }}.augment import (
    DEFAULTS,
    OFF,
    augment,
    choose,
    color_jitter,
    crop_on_cpu,
    crop_on_gpu,
    erase,
    mix,
    random_boxes,
    random_resized_crop,
    shift,
)

UNSET = dict.fromkeys(OFF)
MIXUP, CUTMIX = {**OFF, "mixup": 1.0}, {**OFF, "cutmix": 1.0}


def same(count: int, size: int = 16) -> Tensor:
    """One smooth random image, many times: (count, 3, size, size) uint8."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 255
    image = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear").round().to(torch.uint8)
    return image.expand(count, -1, -1, -1)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda images: augment(images, 16, {**OFF, "flip": True}),
    "shift": lambda images: augment(images, 16, {**OFF, "max_shift": 2}),
    "crop": lambda images: augment(images, 16, {**OFF, "min_area": 0.3}),
    "color": lambda images: augment(images, 16, {**OFF, "color_jitter": 0.4}),
    "erase": lambda images: augment(images, 16, {**OFF, "erasing": 0.5}),
    "mixup": lambda images: mix(fading(images), torch.eye(len(images)), MIXUP)[0],
    "cutmix": lambda images: mix(fading(images), torch.eye(len(images)), CUTMIX)[0],
}


def fading(images: Tensor) -> Tensor:
    """From black to the image as it is."""
    return (images * torch.linspace(0, 1, len(images)).view(-1, 1, 1, 1)).to(torch.uint8)


@pytest.mark.parametrize("name", [name for name in CHANGES if "mix" not in name])
def test_samples_of_one_batch_get_draws_of_their_own(name: str) -> None:
    changed = CHANGES[name](same(64))
    assert len(changed.flatten(1).unique(dim=0)) >= (2 if name == "flip" else 20)


@pytest.mark.parametrize("name", list(CHANGES))
def test_draws_follow_the_seed(name: str) -> None:
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(CHANGES[name](same(64)))
    assert (torch.equal(results[0], results[1]), torch.equal(results[0], results[2])) == (True, False)


@pytest.mark.parametrize("name", list(CHANGES))
def test_batches_keep_shape_and_kind(name: str) -> None:
    changed = CHANGES[name](same(8).to(torch.uint8))
    assert changed.shape == (8, 3, 16, 16) and (changed.dtype == torch.uint8)


def test_nothing_changes_where_all_is_off() -> None:
    assert torch.equal(augment(same(8), 16, OFF), same(8))


# What suits the source


@pytest.mark.parametrize("source", ["digits", "mnist"])
def test_digits_are_not_mirrored(source: str) -> None:
    assert choose(source, UNSET)["flip"] is False


def test_own_files_are_cropped_and_mirrored() -> None:
    assert choose("/somewhere/photos", UNSET) == {**OFF, **DEFAULTS["files"]}


def test_what_is_set_wins_over_what_suits() -> None:
    chosen = choose("cifar10", {**UNSET, "flip": False, "mixup": 0.2})
    assert chosen == {**OFF, "max_shift": 4, "flip": False, "mixup": 0.2}


# Each change


def test_half_of_the_images_are_mirrored() -> None:
    images = same(1000)
    mirrored = (augment(images, 16, {**OFF, "flip": True}) == images.flip(3)).flatten(1).all(dim=1)
    assert mirrored.float().mean() == pytest.approx(0.5, abs=0.06)


def test_half_of_the_crops_are_mirrored() -> None:
    images = torch.arange(16, dtype=torch.uint8).expand(1000, 1, 16, 16) * 10
    crops = augment(images, 16, {**OFF, "flip": True, "min_area": 0.9})
    assert (crops[:, 0, 8, 0] > crops[:, 0, 8, -1]).float().mean() == pytest.approx(0.5, abs=0.06)


def test_mirrored_images_are_left_to_right() -> None:
    images = torch.arange(4, dtype=torch.uint8).view(1, 1, 1, 4).expand(50, 1, 4, 4)
    rows = augment(images, 4, {**OFF, "flip": True})[:, 0].reshape(-1, 4).unique(dim=0)
    assert rows.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_boxes_lie_inside_and_have_the_shares_asked_for() -> None:
    images = torch.zeros(2000, 1, 40, 60)
    top, left, height, width = random_boxes(images, 0.2, 0.6, max_stretch=1.2).unbind(1)
    assert min(top.min(), left.min()) >= 0 and (top + height).max() <= 40.001 and (left + width).max() <= 60.001
    shares = height * width / 2400
    assert (shares.min().item(), shares.max().item()) == pytest.approx((0.2, 0.6), abs=0.02)


def test_crop_shows_its_part_of_the_image() -> None:
    images = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    images[:, :, 4:12, 8:16] = 200
    crops = crop_on_cpu(images, torch.tensor([[4.0, 8.0, 8.0, 8.0]]), 16, torch.tensor([False]))
    assert crops.unique().tolist() == [200]


def test_crop_of_the_whole_image_is_the_image() -> None:
    whole = torch.tensor([[0.0, 0.0, 16.0, 16.0]])
    for crop in (crop_on_cpu, crop_on_gpu):
        assert torch.equal(crop(same(1), whole, 16, torch.tensor([False])), same(1))
        assert torch.equal(crop(same(1), whole, 16, torch.tensor([True])), same(1).flip(3))


def test_both_ways_to_crop_agree() -> None:
    images, boxes = same(20, 64), random_boxes(same(20, 64), 0.3, 1.0, max_stretch=4 / 3).round()
    mirrored = torch.arange(20) % 2 == 0
    one, two = (crop(images, boxes, 48, mirrored).float() for crop in (crop_on_cpu, crop_on_gpu))
    assert (one - two).abs().mean() < 1  # of 255: one is antialiased, the other takes the border's pixels at the border


def test_crops_of_a_larger_image_have_the_size_asked_for() -> None:
    assert random_resized_crop(same(4, 32), 24, 0.5, torch.ones(4, dtype=torch.bool)).shape == (4, 3, 24, 24)


def test_each_sample_is_shifted_by_its_own_offset() -> None:
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    shifted = augment(image.expand(200, -1, -1, -1), 8, {**OFF, "max_shift": 1})
    assert len(shifted.flatten(1).unique(dim=0)) == 9


def test_shift_moves_an_image_along_both_axes_and_fills_with_zero() -> None:
    images = torch.zeros(500, 2, 5, 5, dtype=torch.uint8)
    images[:, :, 2, 2] = 9
    places = {tuple(place) for place in (shift(images, 2)[:, 1] == 9).nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in range(5) for column in range(5)}


def test_shift_keeps_an_image_as_it_is_but_for_its_place() -> None:
    images = torch.zeros(50, 3, 8, 8, dtype=torch.uint8)
    images[:, :, 2:6, 2:6] = torch.randint(1, 256, (50, 3, 4, 4), dtype=torch.uint8)
    kept = [shifted[shifted > 0].tolist() for shifted in shift(images, 2)]
    assert kept == [image[image > 0].tolist() for image in images]


def test_shift_by_no_pixel_changes_nothing() -> None:
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(shift(images, 0), images)


def test_color_jitter_keeps_gray_gray() -> None:
    images = torch.full((20, 3, 4, 4), 100, dtype=torch.uint8)
    changed = color_jitter(images, 0.5)
    assert torch.equal(changed[:, 0], changed[:, 1]) and torch.equal(changed[:, 0], changed[:, 2])
    assert 50 <= changed.min() < 70 and 130 < changed.max() <= 150


def test_color_jitter_changes_contrast_and_saturation() -> None:
    images = same(200)
    changed = color_jitter(images, 0.5).float()
    contrast = changed.mean(dim=1).flatten(1).std(dim=1) / changed.mean(dim=(1, 2, 3))
    saturation = changed.std(dim=1).mean(dim=(1, 2)) / changed.mean(dim=(1, 2, 3))
    assert contrast.max() > 1.5 * contrast.min() and saturation.max() > 1.5 * saturation.min()


def test_erased_share_is_as_large_as_said() -> None:
    images = torch.full((2000, 1, 32, 32), 7, dtype=torch.uint8)
    changed = (erase(images, 0.25) != images).float().mean(dim=(1, 2, 3))
    hit = changed[changed > 0]
    assert len(hit) / 2000 == pytest.approx(0.25, abs=0.04)
    assert (hit.min().item(), hit.max().item()) == pytest.approx((0.02, 0.33), abs=0.03)


# Mixing samples


@pytest.mark.parametrize("options", [MIXUP, CUTMIX, {**MIXUP, **{"cutmix": 1.0}}])
def test_mixed_targets_sum_to_one(options: dict[str, Any]) -> None:
    _, targets = mix(same(32), torch.eye(32), options)
    assert targets.sum(dim=1).tolist() == pytest.approx([1.0] * 32)


@pytest.mark.parametrize("options", [MIXUP, CUTMIX])
def test_share_of_a_target_is_the_share_of_the_image(options: dict[str, Any]) -> None:
    images = torch.zeros(64, 1, 16, 16, dtype=torch.uint8)
    images[32:] = 200
    targets = torch.eye(2).repeat_interleave(32, dim=0)
    mixed, shares = mix(images, targets, options)
    assert mixed.float().mean(dim=(1, 2, 3)).tolist() == pytest.approx((shares[:, 1] * 200).tolist(), abs=0.6)


def test_mixup_blends_and_cutmix_cuts() -> None:
    images = torch.zeros(64, 1, 16, 16, dtype=torch.uint8)
    images[32:] = 200
    targets = torch.eye(2).repeat_interleave(32, dim=0)
    assert len(mix(images, targets, MIXUP)[0].unique()) > 10
    assert mix(images, targets, CUTMIX)[0].unique().tolist() == [0, 200]


def test_both_kinds_of_mixing_come_by_turns() -> None:
    images = torch.zeros(64, 1, 16, 16, dtype=torch.uint8)
    images[32:] = 200
    targets = torch.eye(2).repeat_interleave(32, dim=0)
    kinds = {len(mix(images, targets, {**OFF, "mixup": 1.0, "cutmix": 1.0})[0].unique()) > 2 for _ in range(20)}
    assert kinds == {True, False}
