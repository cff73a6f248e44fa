"""A generated project as a package: what its wheel says and holds, and that it runs from there and from a checkout."""

import email
import email.policy
import shutil
import subprocess
import sys
import zipfile
from email.message import EmailMessage
from pathlib import Path

import pytest
from conftest import Bake, contents

TEXT = 'O\'Brien "&" C:\\new *é* 🎉'


@pytest.fixture(scope="module")
def wheel(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked wheel of a project with the default answers."""
    return build(bake(), tmp_path_factory.mktemp("wheel"))


def test_a_wheel_holds_the_package_and_its_recipe_alone(wheel: Path, bake: Bake) -> None:
    recipe = {"recipe.yaml": (bake() / "recipe.yaml").read_bytes()}
    assert contents(wheel / "my_lightning_project") == contents(bake() / "my_lightning_project") | recipe


def test_a_wheel_has_no_other_folders(wheel: Path) -> None:
    folders = ["my_lightning_project", "my_lightning_project-0.1.0.dist-info"]
    assert sorted(path.name for path in wheel.iterdir()) == folders


def test_a_wheel_runs_outside_the_project(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "my_lightning_project", "--help"]
    result = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(wheel)}, capture_output=True, text=True)
    assert result.stdout.startswith("usage: python -m my_lightning_project "), result.stderr


@pytest.mark.parametrize("license", ["MIT", "Apache-2.0", "BSD-3-Clause"])
def test_metadata_names_the_open_licences_as_spdx_does(bake: Bake, tmp_path: Path, license: str) -> None:
    assert metadata(build(bake(license=license), tmp_path))["License-Expression"] == license


def test_metadata_names_a_proprietary_licence(bake: Bake, tmp_path: Path) -> None:
    wheel = build(bake(license="Proprietary"), tmp_path)
    assert metadata(wheel)["License-Expression"] == "LicenseRef-Proprietary"


def test_metadata_holds_the_texts_as_typed(bake: Bake, tmp_path: Path) -> None:
    facts = metadata(build(bake(project_name=TEXT, package_name="net", author_name=TEXT), tmp_path))
    assert (facts["Name"], facts["Summary"], facts["Author"]) == ("net", TEXT, TEXT)


def test_an_editable_install_runs_from_the_checkout(bake: Bake, tmp_path: Path) -> None:
    project = Path(shutil.copytree(bake(), tmp_path / "project"))
    installed = build(project, tmp_path / "wheel", "editable")
    code = f"import site; site.addsitedir({str(installed)!r}); import my_lightning_project as p; print(p.ROOT)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == str(project), result.stderr


def build(project: Path, folder: Path, kind: str = "wheel") -> Path:
    """Build a project as pip does, without a network, and unpack the wheel into the folder."""
    folder.mkdir(exist_ok=True)
    code = f"from hatchling.build import build_{kind} as build; print(build({str(folder)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=project, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(folder / result.stdout.split()[-1]) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def metadata(wheel: Path) -> EmailMessage:
    """What a wheel says of itself."""
    (path,) = wheel.glob("*.dist-info/METADATA")
    return email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
