"""Answers: which are refused, and that all others come through intact."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from conftest import ROOT, Bake, contents
from cookiecutter.exceptions import FailedHookException
from cookiecutter.main import cookiecutter
from jinja2 import TemplateSyntaxError
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Refusal = Callable[..., list[str]]

TEXTS = [
    "O'Brien",
    'The "best" one',
    "C:\\new\\table",
    "ends in a backslash\\",
    '\\"',
    "Zoë Åström, Ltd.",
    "手書き数字",
    "מספרים",
    "🎉 👩‍👩‍👧 \U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "*a* _b_ __c__ `d` <b>e</b> [f](g) ![h](i) ~~j~~",
    "R&D &copy; AT&T &#35;",
    "# 1 #",
    "a: b # c, [d] {e} | > - ? ! @ %",
    "- no",
    "[/red] [bold]rich",
    "'''\"\"\"",
    "'''; open('pwned', 'w') #",
    '"""); open("pwned", "w") #',
    "$(touch pwned) `touch pwned`; touch pwned",
]

# fmt: off
BAD_PACKAGE_NAMES = [
    "", "My_net", "my-net", "my net", "1net", "my__net", "_net", "net_", "réseau", "net\n", "a" * 51,
    "../net", "/net", "a/b", "a.b", "..", "~",
    "class", "match", "type", "random", "test", "distutils", "compression",
    "torch", "lightning", "pil", "yaml", "numpy", "sklearn", "scikit_learn", "pytest",
    "tests", "presets", "runs", "mlruns", "data", "dist", "recipe", "license", "con", "nul", "com1", "lpt9",
]

BAD_TEXTS = [
    "", " ", "\u00a0", " x", "x ", "x" * 101, "a\nb", "a\rb", "a\tb", "a\0b", "a\x1bb", "a\x7fb", "a\x85b",
    "a\u2028b", "a\u2029b", "a\u202eb", "a\u2066b", "\ufeffa", "a\uffff", "a\ud800b",
    "{{ 1 + 1 }}", "{% if true %}x{% endif %}", "x{# y #}", "x }}", "x %}", "x #}",
]
# fmt: on


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_through_toml_intact(bake: Bake, text: str) -> None:
    project = tomllib.loads((bake_texts(bake, text) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["description"], project["authors"]) == (text, [{"name": text}])


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_through_yaml_intact(bake: Bake, text: str) -> None:
    recipe = yaml.safe_load((bake_texts(bake, text) / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["logger"]["experiment_name"] == text


@pytest.mark.parametrize("text", TEXTS)
def test_the_readme_shows_the_name_as_it_was_typed(bake: Bake, text: str) -> None:
    readme = (bake_texts(bake, text) / "README.md").read_text(encoding="utf-8")
    title = MarkdownIt("commonmark").enable("strikethrough").parse(readme)[1]
    assert [(part.type, part.content) for part in title.children or []] == [("text", text)]


@pytest.mark.parametrize("text", TEXTS)
def test_the_licence_names_the_author_as_typed(bake: Bake, text: str) -> None:
    assert f"Copyright (c) {text}\n" in (bake_texts(bake, text) / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_never_executed(bake: Bake, text: str) -> None:
    """Hooks run in the project's folder, so that is where each `pwned` of the texts would lie."""
    assert contents(bake_texts(bake, text)).keys() == contents(bake(package_name="a")).keys()


def test_an_ordinary_name_stays_as_it_is_in_the_readme(bake: Bake) -> None:
    assert (bake() / "README.md").read_text(encoding="utf-8").startswith("# My Lightning Project\n")


@pytest.mark.parametrize("name", ["a", "my_net", "net2", "resnet_50", "a" * 50])
def test_good_package_names_are_accepted(bake: Bake, name: str) -> None:
    assert (bake(package_name=name) / name / "__main__.py").is_file()


@pytest.mark.parametrize(
    ("project_name", "package_name"), [("X", "x"), ("Zoë's 2nd  net!", "zoe_s_2nd_net"), ("My-Net_2", "my_net_2")]
)
def test_the_package_name_follows_from_the_project_name(bake: Bake, project_name: str, package_name: str) -> None:
    assert (bake(project_name=project_name) / package_name).is_dir()


@pytest.mark.parametrize("name", BAD_PACKAGE_NAMES)
def test_bad_package_names_are_refused_in_one_line(refusal: Refusal, name: str) -> None:
    assert [line.partition(" ")[0] for line in refusal(package_name=name)] == ["package_name"]


@pytest.mark.parametrize("text", BAD_TEXTS)
@pytest.mark.parametrize("question", ["project_name", "author_name"])
def test_bad_texts_are_refused_in_one_line(refusal: Refusal, question: str, text: str) -> None:
    answers = {"package_name": "a", question: text}
    assert [line.partition(" ")[0] for line in refusal(**answers)] == [question]


def test_a_refusal_says_what_is_wrong_and_what_would_do(refusal: Refusal) -> None:
    assert refusal(package_name="torch") == [
        "package_name 'torch' would hide a package that the project needs; add a word: my_torch"
    ]


def test_all_bad_answers_are_refused_at_once(refusal: Refusal) -> None:
    lines = refusal(project_name="\u202e", package_name="naïve", author_name=" ")
    assert [line.partition(" ")[0] for line in lines] == ["project_name", "author_name", "package_name"]


def test_refusals_are_ascii(refusal: Refusal) -> None:
    assert "\n".join(refusal(project_name="🎉\n", package_name="naïve", author_name="é ")).isascii()


def test_refused_answers_leave_nothing_behind(refusal: Refusal, tmp_path: Path) -> None:
    refusal(package_name="../torch", author_name=" ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_elsewhere_is_refused_and_removed(refusal: Refusal, tmp_path: Path) -> None:
    refusal(__folder="../elsewhere")
    assert not (tmp_path.parent / "elsewhere").exists()


def test_an_unfinished_template_mark_leaves_nothing_behind(template: Path, tmp_path: Path) -> None:
    """Cookiecutter renders answers from the command line itself, and stops here before the template has a say."""
    answers = {"project_name": "{% x"}
    with pytest.raises(TemplateSyntaxError):
        cookiecutter(str(template), no_input=True, extra_context=answers, output_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_licence_that_is_not_offered_is_refused_from_a_replay_file(
    template: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    questions = json.loads((template / "cookiecutter.json").read_text(encoding="utf-8"))
    answers = dict.fromkeys(questions, "a") | {"license": "GPL-3.0"}
    replay = tmp_path / "answers.json"
    replay.write_text(json.dumps({"cookiecutter": answers}))
    with pytest.raises(FailedHookException):
        cookiecutter(str(template), replay=str(replay), output_dir=str(tmp_path))
    assert capfd.readouterr().err.startswith("license 'GPL-3.0' is not on offer; choose from MIT, ")


def test_what_is_typed_at_a_prompt_is_not_evaluated(template: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cookiecutter", str(template), "--output-dir", str(tmp_path / "out")]
    typed = "{{ cycler.__init__.__globals__.os.system('touch pwned') }}\nnet\n\n\n"
    subprocess.run(command, input=typed, text=True, capture_output=True, cwd=tmp_path)
    assert not list(tmp_path.rglob("pwned")) + list(tmp_path.glob("out/*"))


def test_texts_typed_at_a_prompt_come_through_intact(template: Path, tmp_path: Path) -> None:
    text = 'O\'Brien "&" C:\\new [/red] é 🎉'
    command = [sys.executable, "-m", "cookiecutter", str(template), "--output-dir", str(tmp_path)]
    subprocess.run(command, input=f"{text}\nnet\n\n\n".encode(), capture_output=True, check=True)
    recipe = yaml.safe_load((tmp_path / "net" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["logger"]["experiment_name"] == text


def test_names_of_everything_installed_with_a_project_are_refused(bake: Bake) -> None:
    project = tomllib.loads((bake() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tools = [*project["optional-dependencies"]["dev"], "hatchling", "pip", "setuptools"]
    distributions = installed(project["dependencies"] + tools)
    modules = importlib.metadata.packages_distributions()
    names = {name for name, owners in modules.items() if distributions & {canonicalize_name(owner) for owner in owners}}
    names = {name.lower() for name in names | {name.replace("-", "_") for name in distributions}}
    problem = hook().package_name_problem
    assert [name for name in sorted(names) if problem(name) is None] == []


def test_names_of_a_project_s_own_files_and_folders_are_refused(bake: Bake) -> None:
    names = {path.stem.lower() for path in bake().iterdir() if path.name != "my_lightning_project"}
    names = {name for name in names if not name.startswith(".")}
    assert [name for name in sorted(names) if hook().package_name_problem(name) is None] == []


def test_names_that_a_project_s_gitignore_hides_are_refused(bake: Bake) -> None:
    lines = (bake() / ".gitignore").read_text(encoding="utf-8").splitlines()
    names = {line.strip("/") for line in lines if line.endswith("/")}
    assert [name for name in sorted(names) if hook().package_name_problem(name) is None] == []


def bake_texts(bake: Bake, text: str) -> Path:
    return bake(project_name=text, author_name=text, package_name="a")


def hook() -> ModuleType:
    """The hook that refuses answers, as a module."""
    spec = importlib.util.spec_from_file_location("pre_gen_project", ROOT / "hooks" / "pre_gen_project.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed(requirements: list[str]) -> set[str]:
    """Names of the distributions that requirements bring with them, all the way down, as far as they are installed."""
    found: set[tuple[str, str]] = set()
    queue = [(Requirement(text), "") for text in requirements]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) not in found:
                found.add((requirement.name, wanted))
                queue += [(Requirement(text), wanted) for text in requires(requirement.name)]
    return {canonicalize_name(name) for name, _ in found}


def requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
