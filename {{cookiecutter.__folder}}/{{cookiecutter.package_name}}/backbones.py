"""Networks that others designed, and perhaps trained: any classification network of torchvision's, or of timm's."""

from typing import Any

import torchvision
from torch import Tensor, nn

from . import UserError
from .checkpoints import load_checkpoint
from .model import Normalize


def from_torchvision(name: str, pretrained: bool) -> tuple[nn.Module, int, dict[str, Any]]:
    """A network without its last layer, the number of its features, and the statistics that its weights go with."""
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise UserError(
            f"model.backbone is {name!r}; expected small, mlp, a classification network of torchvision's such as "
            "resnet18, or timm/NAME."
        )
    network: nn.Module = torchvision.models.get_model(name, weights=None)
    statistics: dict[str, Any] = {}
    if pretrained:
        weights = torchvision.models.get_model_weights(name).DEFAULT
        try:
            network.load_state_dict(weights.get_state_dict(check_hash=True, weights_only=True))
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"The weights of {name} can't be loaded ({' '.join(str(error).split())[:200]}). Connect to the network "
                f"once, or put {weights.url} into torch hub's folder `checkpoints`."
            ) from error
        transform = weights.transforms()
        statistics = {"mean": transform.mean, "std": transform.std}
    layers = [(path, layer) for path, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not layers or layers[-1][1].out_features != 1000:
        raise UserError(f"model.backbone {name} does not end with a linear layer that could be replaced. Take another.")
    path, last = layers[-1]
    parent, _, child = path.rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Identity())
    return network, last.in_features, statistics


def from_timm(name: str, pretrained: bool) -> tuple[nn.Module, int, dict[str, Any]]:
    """The same of the package timm."""
    try:
        import timm
    except ImportError as error:
        raise UserError(f"model.backbone timm/{name} needs a package: python -m pip install timm") from error
    if name not in timm.list_models():
        raise UserError(f"model.backbone is timm/{name}, which timm does not have. See timm.list_models().")
    network: Any = timm.create_model(name, pretrained=pretrained, num_classes=0)
    config = network.pretrained_cfg
    return network, network.num_features, {"mean": config["mean"], "std": config["std"]} if pretrained else {}


def load_body(network: nn.Module, path: str) -> None:
    """Take all but the head, its normalisation included, from a checkpoint of this project.

    Raises:
        UserError: It can't be read, or is of another network.
    """
    prefix = "network."
    weights = {key.removeprefix(prefix): value for key, value in load_checkpoint(path)["state_dict"].items()}
    body = {key: value for key, value in network.state_dict().items() if not key.startswith("head.")}
    if other := [key for key, value in body.items() if key not in weights or value.shape != weights[key].shape]:
        raise UserError(
            f"model.pretrained {path} is of another network: {len(other)} tensors, first {other[0]}, differ."
        )
    network.load_state_dict({key: weights[key] for key in body}, strict=False)


class Backbone(nn.Module):
    """A known network with a head for these classes.

    Args:
        name: As torchvision spells it, such as `resnet18`, or `timm/` and a name of timm's.
        input_spec: What the data module yields: `shape` [C, H, W], and `mean` and `std` of each channel.
        num_classes: Number of logits, K.
        dropout: Share of the features that is dropped before the last layer.
        pretrained: Whether to load weights; inputs are then normalised as they were when these were trained.
    """

    def __init__(
        self, name: str, input_spec: dict[str, Any], num_classes: int, dropout: float, pretrained: bool
    ) -> None:
        super().__init__()
        load = from_timm if name.startswith("timm/") else from_torchvision
        self.features, num_features, statistics = load(name.removeprefix("timm/"), pretrained)
        channels = input_spec["shape"][0]
        if channels not in (1, 3):
            raise UserError(f"model.backbone {name} takes images with 1 or 3 channels, these have {channels}.")
        own = {key: input_spec[key] * (3 // channels) for key in ("mean", "std")}
        self.normalize = Normalize(**{**own, **statistics})
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(num_features, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1 or 3, H, W) uint8 -> (B, K) float32 logits; of gray images, each channel gets the same."""
        features: Tensor = self.features(self.normalize(images.expand(-1, 3, -1, -1)))
        logits: Tensor = self.head(features)
        return logits
