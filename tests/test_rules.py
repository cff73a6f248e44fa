"""RULES.md: each row names a file and a test that a generated project has."""

import re

import pytest
from conftest import ROOT, Bake

TABLE = (ROOT / "RULES.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([A-F]\d+) \| .+ \| `(.+)` \| `(.+)::(.+)` \|$", TABLE, re.MULTILINE)


def test_each_line_of_the_table_is_read() -> None:
    lines = re.findall(r"^\| [A-F]\d+ ", TABLE, re.MULTILINE)
    assert len(lines) == len(ROWS) == len({row[0] for row in ROWS})


@pytest.mark.parametrize(("rule", "file", "tests", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_a_rule_has_its_file_and_its_test(bake: Bake, rule: str, file: str, tests: str, name: str) -> None:
    project = bake()
    folder = project if file == "recipe.yaml" else project / "my_lightning_project"
    text = (project / "tests" / tests).read_text("utf-8")
    assert ((folder / file).is_file(), text.count(f"def {name}(")) == (True, 1)


def test_rules_that_are_missing_are_said_to_be() -> None:
    all_rules = {*["A1", "A2", "A3", "A4", "B1", "B2", "B3", "B4", "B5"], *(f"C{n}" for n in range(1, 15))}
    all_rules |= {*["D1", "D2", "D3", "D4", "E1", "E2", "E3", "E4", "F1", "F2", "F3", "F4"]}
    head = TABLE.split("## A.")[0]
    assert set(re.findall(r"\b[A-F]\d+\b", head)) == all_rules - {row[0] for row in ROWS}
