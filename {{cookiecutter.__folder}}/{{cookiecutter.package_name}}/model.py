"""The network, in plain PyTorch: raw inputs in, logits out. Swap it here; nothing else has to change.

Shape letters, the same in every file: B batch, C channels, H height, W width, K classes.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """Scales raw pixels and standardises each channel, so that the exported graph needs no preprocessing.

    Args:
        mean: Mean of each channel, in units of the pixel range [0, 1].
        std: Standard deviation of each channel, in the same units.
    """

    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.channel_mean: Tensor
        self.channel_std: Tensor
        # Not `mean` and `std`: the ONNX exporter's own nodes take these names (pytorch/pytorch#168211).
        self.register_buffer("channel_mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("channel_std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) uint8 in [0, 255] -> (B, C, H, W) float32, mean 0 and deviation 1 over the training split."""
        return (images.float() / 255 - self.channel_mean) / self.channel_std


def conv_block(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    """(B, in, H, W) -> (B, out, H / stride, W / stride): 3x3 convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class Network(nn.Module):
    """A small convolutional classifier for images of any size from 8x8 up.

    Args:
        input_spec: What the data module yields: `shape` [C, H, W], and `mean` and `std` of each channel.
        num_classes: Number of logits, K.
        width: Channels of the first block; the second has twice, the third four times as many.
        dropout: Share of the features that is dropped before the last layer.
    """

    def __init__(self, input_spec: dict[str, Any], num_classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.normalize = Normalize(input_spec["mean"], input_spec["std"])
        # Strided convolutions and a plain mean: the CUDA kernels of adaptive pooling are not deterministic.
        self.features = nn.Sequential(
            conv_block(input_spec["shape"][0], width),
            conv_block(width, 2 * width, stride=2),
            conv_block(2 * width, 2 * width),
            conv_block(2 * width, 4 * width, stride=2),
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(4 * width, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) uint8 -> (B, K) float32 logits."""
        features: Tensor = self.features(self.normalize(images))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class MLP(nn.Module):
    """One hidden layer on the flattened inputs, of any shape.

    Args:
        input_spec: What the data module yields: `shape`, and `mean` and `std` of each channel.
        num_classes: Number of logits, K.
        width: Units of the hidden layer.
    """

    def __init__(self, input_spec: dict[str, Any], num_classes: int, width: int) -> None:
        super().__init__()
        self.normalize = Normalize(input_spec["mean"], input_spec["std"])
        num_inputs = math.prod(input_spec["shape"])
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, width), nn.ReLU())
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) uint8 -> (B, K) float32 logits."""
        logits: Tensor = self.head(self.features(self.normalize(images)))
        return logits


def make_network(options: Mapping[str, Any], pretrained: bool | str) -> nn.Module:
    """The network that `options["backbone"]` names; it has the parts `features` and `head`.

    Args:
        options: Those of the task.
        pretrained: Whether to load weights that somebody trained on other data, or a checkpoint that has such.

    Raises:
        UserError: There is no such network, or no such weights.
    """
    name, spec, num_classes = options["backbone"], options["input_spec"], len(options["classes"])
    from .backbones import Backbone, load_body  # read late, because it builds on this file

    network: nn.Module
    if name == "small":
        network = Network(spec, num_classes, options["width"], options["dropout"])
    elif name == "mlp":
        network = MLP(spec, num_classes, width=8 * options["width"])
    else:
        network = Backbone(name, spec, num_classes, options["dropout"], pretrained is True)
    if isinstance(pretrained, str):
        load_body(network, pretrained)
    return network
