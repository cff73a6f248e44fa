"""A generated project: which files it has, that they are clean, and the same however the template was reached."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import Bake, contents
from cookiecutter.main import cookiecutter

LICENSES = {
    "MIT": "MIT License",
    "Apache-2.0": "                                 Apache License",
    "BSD-3-Clause": "BSD 3-Clause License",
    "Proprietary": "Copyright (c) Your Name. All rights reserved.",
}

FILES = [
    ".gitattributes",
    ".github/workflows/test.yml",
    ".gitignore",
    "LICENSE",
    "README.md",
    "presets/debug.yaml",
    "presets/fashion_mnist.yaml",
    "presets/fast.yaml",
    "presets/finetune.yaml",
    "presets/profile.yaml",
    "pyproject.toml",
    "recipe.yaml",
    "requirements.lock",
    "tests/conftest.py",
    "tests/test_augment.py",
    "tests/test_backbones.py",
    "tests/test_check.py",
    "tests/test_cli.py",
    "tests/test_curves.py",
    "tests/test_data.py",
    "tests/test_export.py",
    "tests/test_images.py",
    "tests/test_model.py",
    "tests/test_optim.py",
    "tests/test_own_data.py",
    "tests/test_presets.py",
    "tests/test_registry.py",
    "tests/test_resume.py",
    "tests/test_scan.py",
    "tests/test_sources.py",
    "tests/test_splits.py",
    "tests/test_stopped.py",
    "tests/test_task.py",
    "tests/test_tracking.py",
    "tests/test_tune.py",
]

PACKAGE = """
__init__ __main__ augment backbones check checkpoints cli curves data export facts images latency listing loader
metrics model optim order parity parser picture registry resume runs scan sources speed splits stopped store task
tracking tune
"""


@pytest.fixture(params=LICENSES)
def project(request: pytest.FixtureRequest, bake: Bake) -> Path:
    """A project of each licence, with texts that need escaping."""
    text = 'O\'Brien "&" C:\\new *é* 🎉'
    return bake(project_name=text, package_name="net", author_name=text, license=request.param)


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Path:
    """The template as a git repository, with all of it committed that its .gitignore lets through."""
    folder = Path(shutil.copytree(template, tmp_path / "template.git"))
    git("init", cwd=folder)
    git("add", "--all", cwd=folder)
    git("commit", "--message", "Template", cwd=folder)
    return folder


def test_a_project_has_these_files(bake: Bake) -> None:
    package = [f"my_lightning_project/{name}.py" for name in PACKAGE.split()]
    assert sorted(contents(bake())) == sorted(FILES + package)


@pytest.mark.parametrize("license", LICENSES)
def test_the_licence_is_the_one_chosen(bake: Bake, license: str) -> None:
    text = (bake(license=license) / "LICENSE").read_text(encoding="utf-8")
    assert text.splitlines()[0] == LICENSES[license]


def test_the_apache_licence_is_complete(bake: Bake) -> None:
    text = (bake(license="Apache-2.0") / "LICENSE").read_text(encoding="utf-8")
    headings = re.findall(r"^   (\d)\. ", text, flags=re.MULTILINE) + re.findall("END OF TERMS|APPENDIX", text)
    assert headings == [*"123456789", "END OF TERMS", "APPENDIX"]


def test_no_jinja_is_left(project: Path) -> None:
    left = re.compile(rb"\{\{\s*_?cookiecutter|\{%|\{#")
    assert [name for name, data in contents(project).items() if left.search(data)] == []


def test_files_end_in_one_line_feed_and_hold_no_trailing_blanks(project: Path) -> None:
    dirty = re.compile(rb"\r|[ \t]\n|\A\n|\n\n\Z|[^\n]\Z")
    assert [name for name, data in contents(project).items() if dirty.search(data)] == []


def test_files_are_utf8(project: Path) -> None:
    texts = [data.decode("utf-8") for data in contents(project).values()]
    assert any("🎉" in text for text in texts)


def test_toml_yaml_and_python_parse(project: Path) -> None:
    parsers = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load, ".py": ast.parse}
    for name, data in contents(project).items():
        if parse := parsers.get(Path(name).suffix):
            assert parse(data.decode("utf-8")), name


def test_the_template_s_own_toml_and_yaml_parse_as_they_are(template: Path) -> None:
    """So that editors and tools can read them in place: every Jinja expression stands within double quotes."""
    folder = template / "{{cookiecutter.__folder}}"
    parsed = [tomllib.loads(path.read_text(encoding="utf-8")) for path in folder.rglob("*.toml")]
    parsed += [yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.rglob("*.y*ml")]
    assert all(parsed)


@pytest.mark.parametrize("folder", ["{{cookiecutter.package_name}}", ".github/workflows"])
def test_the_package_and_its_workflow_are_copied_and_never_rendered(
    template: Path, tmp_path: Path, folder: str
) -> None:
    copy = Path(shutil.copytree(template, tmp_path / "template"))
    probe = copy / "{{cookiecutter.__folder}}" / folder / "probe.py"
    probe.write_text('"{{ cookiecutter.package_name }}"\n', encoding="utf-8")
    project = cookiecutter(str(copy), no_input=True, output_dir=str(tmp_path), extra_context={"package_name": "net"})
    assert [path.read_bytes() for path in Path(project).rglob("probe.py")] == [probe.read_bytes()]


def test_the_package_has_no_folders(bake: Bake) -> None:
    assert [path for path in (bake() / "my_lightning_project").iterdir() if path.is_dir()] == []


def test_each_file_of_the_package_fits_in_a_head(bake: Bake) -> None:
    assert {name: count for name, count in lines_of_package(bake()).items() if count > 220} == {}


def test_what_people_edit_can_be_read_in_ten_minutes(bake: Bake) -> None:
    lines = lines_of_package(bake())
    assert sum(lines[f"{name}.py"] for name in ("model", "data", "augment", "task", "optim", "metrics")) <= 1000


def test_the_package_stays_small(bake: Bake) -> None:
    assert sum(lines_of_package(bake()).values()) <= 4570


def test_ruff_finds_nothing_in_a_project(project: Path) -> None:
    assert ruff(project, "check") + ruff(project, "format", "--check") == []


def test_ruff_finds_nothing_in_the_template(template: Path) -> None:
    package = "{{cookiecutter.__folder}}/{{cookiecutter.package_name}}"
    found = [
        ruff(template, *command, place) for command in (["check"], ["format", "--check"]) for place in (".", package)
    ]
    assert sum(found, []) == []


def test_types_hold_in_a_project(bake: Bake, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=bake(), capture_output=True, text=True)
    assert result.stdout.splitlines()[-1].startswith("Success"), result.stdout


def test_hooks_write_nothing(template: Path, bake: Bake, tmp_path: Path) -> None:
    project = cookiecutter(str(template), no_input=True, output_dir=str(tmp_path), accept_hooks=False)
    assert contents(Path(project)) == contents(bake())


def test_the_next_commands_are_printed(template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cookiecutter(str(template), no_input=True, output_dir=str(tmp_path))
    assert capfd.readouterr().out == (
        "Made my-lightning-project. Next:\n"
        "  cd my-lightning-project\n"
        "  python -m pip install -e .\n"
        "  python -m my_lightning_project fit\n"
    )


def test_a_git_repository_gives_the_same_project(repository: Path, bake: Bake, tmp_path: Path) -> None:
    project = cookiecutter(repository.as_uri(), no_input=True, output_dir=str(tmp_path / "out"))
    assert contents(Path(project)) == contents(bake())


def test_a_zip_gives_the_same_project(template: Path, bake: Bake, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "template"), "zip", template.parent, template.name)
    project = cookiecutter(archive, no_input=True, output_dir=str(tmp_path))
    assert contents(Path(project)) == contents(bake())


def test_cruft_gives_the_same_project(repository: Path, bake: Bake, tmp_path: Path) -> None:
    assert contents(cruft_create(repository, tmp_path)) == contents(bake())


def test_cruft_brings_a_change_of_the_template_into_a_project(repository: Path, bake: Bake, tmp_path: Path) -> None:
    project = cruft_create(repository, tmp_path)
    git("init", cwd=project)
    git("add", "--all", cwd=project)
    git("commit", "--message", "Project", cwd=project)
    changed = repository / "{{cookiecutter.__folder}}" / ".gitignore"
    changed.write_text(changed.read_text(encoding="utf-8") + "/new/\n", encoding="utf-8")
    git("commit", "--all", "--message", "Change", cwd=repository)
    subprocess.run(cruft("update", "--skip-apply-ask"), cwd=project, check=True, capture_output=True)
    assert contents(project) == contents(bake()) | {".gitignore": changed.read_bytes()}


def test_paths_of_the_template_are_legal_on_windows(repository: Path) -> None:
    paths = git("ls-files", "-z", cwd=repository).strip("\0").split("\0")
    illegal = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ](/|$)|(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.|/|$)', re.IGNORECASE)
    assert [path for path in paths if illegal.search(path)] == []


def test_paths_of_the_template_differ_by_more_than_case(repository: Path) -> None:
    paths = git("ls-files", "-z", cwd=repository).strip("\0").lower().split("\0")
    assert sorted(paths) == sorted(set(paths))


def lines_of_package(project: Path) -> dict[str, int]:
    return {name: data.count(b"\n") for name, data in contents(project / "my_lightning_project").items()}


def git(*arguments: str, cwd: Path) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout


def ruff(folder: Path, *arguments: str) -> list[str]:
    """The complaints of ruff about a folder."""
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--quiet"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.splitlines()


def cruft(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cruft", *arguments]


def cruft_create(repository: Path, folder: Path) -> Path:
    """A project made by cruft with the default answers."""
    arguments = ["create", str(repository), "--no-input", "--output-dir", str(folder)]
    subprocess.run(cruft(*arguments), check=True, capture_output=True)
    return folder / "my-lightning-project"
