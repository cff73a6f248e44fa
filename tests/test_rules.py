"""RULES.md: each row names a file and a test that a generated project has, and what the test is known to notice."""

import re

import pytest
from conftest import ROOT, Bake
from mutations import ROWS, TAKEN_OUT

TABLE = (ROOT / "RULES.md").read_text("utf-8")


def test_each_line_of_the_table_is_read() -> None:
    lines = re.findall(r"^\| [A-F]\d+ ", TABLE, re.MULTILINE)
    assert len(lines) == len(ROWS) == len({row[0] for row in ROWS})


def test_every_rule_has_its_row() -> None:
    counts = {"A": 4, "B": 5, "C": 14, "D": 4, "E": 4, "F": 4}
    assert {row[0] for row in ROWS} == {f"{part}{n + 1}" for part, count in counts.items() for n in range(count)}


@pytest.mark.parametrize(("rule", "file", "tests", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_a_rule_has_its_file_and_its_test(bake: Bake, rule: str, file: str, tests: str, name: str) -> None:
    project = bake()
    folder = project if file == "recipe.yaml" else project / "my_lightning_project"
    text = (project / "tests" / tests).read_text("utf-8")
    assert ((folder / file).is_file(), text.count(f"def {name}(")) == (True, 1)


@pytest.mark.parametrize("rule", [row[0] for row in ROWS])
def test_what_makes_a_rule_true_can_be_taken_out(bake: Bake, rule: str) -> None:
    """So that `make rules` tries out that the named test fails then."""
    file, old, new, _ = TAKEN_OUT[rule]
    path = bake() / ("" if file == "recipe.yaml" else "my_lightning_project") / file
    assert (path.read_text("utf-8").count(old), new != old) == (1, True)
