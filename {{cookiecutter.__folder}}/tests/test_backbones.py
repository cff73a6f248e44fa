"""Networks by name: small, mlp, torchvision's and timm's, with and without weights that somebody trained."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor

from {{ cookiecutter.package_name }} import UserError
from {{ cookiecutter.package_name }}.checkpoints import load_checkpoint
from {{ cookiecutter.package_name }}.data import DataModule
from {{ cookiecutter.package_name }}.export import freeze, write_onnx
from {{ cookiecutter.package_name }}.model import MLP, Network, make_network
from {{ cookiecutter.package_name }}.optim import stages
from {{ cookiecutter.package_name }}.parity import compare
from {{ cookiecutter.package_name }}.task import ClassificationTask

SPEC = {"name": "images", "shape": [3, 32, 32], "dtype": "uint8", "mean": [0.5] * 3, "std": [0.25] * 3}
OPTIONS: dict[str, Any] = {"input_spec": SPEC, "classes": ["a", "b", "c"], "width": 4, "dropout": 0.0}
LIGHT = "shufflenet_v2_x0_5"  # of torchvision's, one with few weights


def make(backbone: str, pretrained: bool = False, **spec: Any) -> torch.nn.Module:
    return make_network({**OPTIONS, "backbone": backbone, "input_spec": {**SPEC, **spec}}, pretrained)


def images(channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (4, channels, 32, 32), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("name", "kind"), [("small", Network), ("mlp", MLP)])
def test_own_networks_are_chosen_by_name(name: str, kind: type) -> None:
    assert isinstance(make(name), kind)


def test_mlp_is_the_one_of_a_tutorial() -> None:
    network = make_network({**OPTIONS, "backbone": "mlp", "width": 32}, pretrained=False)
    assert [tuple(value.shape) for value in network.parameters()] == [(256, 3072), (256,), (3, 256), (3,)]


@pytest.mark.parametrize("name", [LIGHT, "resnet18", "mobilenet_v3_small", "efficientnet_b0", "densenet121"])
@pytest.mark.parametrize("channels", [1, 3])
def test_networks_of_torchvision_get_a_head_for_these_classes(name: str, channels: int) -> None:
    network = make(name, shape=[channels, 32, 32], mean=[0.5] * channels, std=[0.25] * channels).eval()
    assert network(images(channels)).shape == (4, 3) and len(stages(network)) > 2


def test_each_parameter_of_a_known_network_is_trained_once() -> None:
    network = make(LIGHT)
    names = [name for name, _ in network.named_parameters()]
    assert len(names) == len(set(names)) and {name.split(".")[0] for name in names} == {"features", "head"}


@pytest.mark.parametrize("name", ["resnet17", "fasterrcnn_resnet50_fpn", "os", "squeezenet1_0"])
def test_what_is_no_network_for_this_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"model.backbone .*{name}"):
        make(name)


def test_images_of_other_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="takes images with 1 or 3 channels, these have 2"):
        make(LIGHT, shape=[2, 32, 32])


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Weights in torch hub's cache, in the file that torchvision would download."""
    torch.manual_seed(7)
    state = torchvision.models.get_model(LIGHT, weights=None).state_dict()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = tmp_path / "hub" / "checkpoints" / torchvision.models.get_model_weights(LIGHT).DEFAULT.url.split("/")[-1]
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    return state


def test_pretrained_weights_are_those_of_the_file(weights: dict[str, Tensor]) -> None:
    loaded = make(LIGHT, pretrained=True).features.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.items())


def test_pretrained_weights_bring_their_normalisation(weights: dict[str, Tensor]) -> None:
    network = make(LIGHT, pretrained=True)
    assert network.normalize.channel_mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])


def test_without_pretrained_weights_the_normalisation_is_that_of_the_data() -> None:
    assert make(LIGHT).normalize.channel_mean.flatten().tolist() == [0.5] * 3


def test_code_in_a_file_of_weights_is_not_run(weights: dict[str, Tensor], tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    (path,) = (tmp_path / "hub" / "checkpoints").iterdir()
    torch.save(Attack(), path)
    with pytest.raises(Exception, match="(?i)weights"):
        make(LIGHT, pretrained=True)
    assert not (tmp_path / "ran").exists()


def test_weights_that_can_not_be_downloaded_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there: as good as no network
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(UserError, match=f"The weights of {LIGHT} can't be loaded .*Connect to the network once"):
        make(LIGHT, pretrained=True)


def test_a_checkpoint_needs_no_pretrained_weights(weights: dict[str, Tensor], tmp_path: Path) -> None:
    datamodule = DataModule(batch_size=64, image_size=32)
    datamodule.setup("fit")
    task = ClassificationTask(backbone=LIGHT, pretrained=True)
    task.adopt(datamodule)
    (file,) = (tmp_path / "hub" / "checkpoints").iterdir()
    file.unlink()
    again = ClassificationTask(**task.hparams)
    again.load_state_dict(task.state_dict())
    inputs = datamodule.splits["val"].__getitems__([0, 1, 2])[0]
    assert torch.equal(again.eval()(inputs), task.eval()(inputs))


def test_all_but_the_head_comes_from_a_checkpoint(trained: SimpleNamespace) -> None:
    spec = {"input_spec": {**SPEC, "shape": [1, 8, 8], "mean": [0.5], "std": [0.25]}, "backbone": "small"}
    own, weights = (
        make_network({**OPTIONS, **spec}, str(trained.best)),
        load_checkpoint(str(trained.best))["state_dict"],
    )
    body = {key: value for key, value in own.state_dict().items() if not key.startswith("head.")}
    assert len(body) > 10 and all(torch.equal(value, weights[f"network.{key}"]) for key, value in body.items())
    assert own.head[1].weight.shape[0] == 3


@pytest.mark.parametrize("change", [{"width": 8}, {"backbone": "mlp"}])
def test_a_checkpoint_of_another_network_is_refused(trained: SimpleNamespace, change: dict[str, Any]) -> None:
    spec = {"input_spec": {**SPEC, "shape": [1, 8, 8], "mean": [0.5], "std": [0.25]}, "backbone": "small"}
    with pytest.raises(UserError, match=r"model.pretrained .*best.ckpt is of another network"):
        make_network({**OPTIONS, **spec, **change}, str(trained.best))


def test_a_known_network_is_exported_equal(tmp_path: Path) -> None:
    import onnxruntime as ort

    frozen = freeze(make(LIGHT))
    write_onnx(frozen, SPEC, tmp_path / "model.onnx")
    session = ort.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    compare(session, frozen, images(), {"rtol": 1e-3, "atol": 1e-4})


def test_timm_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match="pip install timm"):
        make("timm/resnet18")


def test_networks_of_timm_get_a_head_for_these_classes() -> None:
    pytest.importorskip("timm")
    assert make("timm/resnet10t").eval()(images()).shape == (4, 3)
