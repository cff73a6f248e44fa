"""The network: a row of numbers in, logits out."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Network(nn.Module):
    def __init__(self, input_spec: dict[str, Any], num_classes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("channel_mean", torch.tensor(input_spec["mean"]))
        self.register_buffer("channel_std", torch.tensor(input_spec["std"]))
        self.layers = nn.Sequential(
            nn.Linear(input_spec["shape"][0], 4 * width), nn.ReLU(), nn.Linear(4 * width, num_classes)
        )

    def forward(self, features: Tensor) -> Tensor:
        """(B, F) float32 -> (B, K) float32 logits."""
        logits: Tensor = self.layers((features - self.channel_mean) / self.channel_std)
        return logits


def make_network(options: Mapping[str, Any], pretrained: bool) -> nn.Module:
    return Network(options["input_spec"], len(options["classes"]), options["width"])
