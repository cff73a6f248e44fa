"""Projects to test: generated as users generate them, each set of answers once in a session."""

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cookiecutter.exceptions import FailedHookException
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).parent.parent

# What tools leave in a checkout, and a clone does not have.
LEFTOVERS = shutil.ignore_patterns(".git", ".venv", "demo", "__pycache__", ".*_cache")

Bake = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the settings in the user's home out of the tests, and the tests out of the user's home."""
    home = tmp_path_factory.mktemp("home")
    config = home / "config.yaml"
    config.write_text(yaml.safe_dump({name: str(home / name) for name in ("replay_dir", "cookiecutters_dir")}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKIECUTTER_CONFIG", str(config))
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        for who in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{who}_NAME", "A")
            patch.setenv(f"GIT_{who}_EMAIL", "a@b.invalid")
        patch.setenv("OMP_NUM_THREADS", "1")  # networks this small gain nothing from more, and tests run side by side
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # projects are shared between tests and stay as they were made
        yield


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as in a clone. Read only."""
    folder = tmp_path_factory.mktemp("template") / "cookiecutter-lightning"
    return Path(shutil.copytree(ROOT, folder, ignore=LEFTOVERS))


@pytest.fixture(scope="session")
def bake(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """Function from answers to the folder of the project. Read only: copy it before changing it."""

    @functools.cache
    def bake(**answers: str) -> Path:
        folder = tmp_path_factory.mktemp("baked")
        return Path(cookiecutter(str(template), no_input=True, extra_context=answers, output_dir=str(folder)))

    return bake


@pytest.fixture
def refusal(template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Function from bad answers to the lines that say what is wrong with them. Projects would go to `tmp_path`."""

    def refusal(**answers: str) -> list[str]:
        with pytest.raises(FailedHookException):
            cookiecutter(str(template), no_input=True, extra_context=answers, output_dir=str(tmp_path))
        return capfd.readouterr().err.splitlines()

    return refusal


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, without git's and cruft's own: relative path with slashes -> bytes."""
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    own = (".git", ".cruft.json")
    return {name.as_posix(): path.read_bytes() for name, path in files.items() if name.parts[0] not in own}
