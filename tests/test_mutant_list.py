"""The list of `mutants.py` follows the code: each break can be applied, and is Python."""

import ast
from pathlib import Path

import mutants
import pytest
from mutants import LIST, SOURCE, TESTS, Mutant, read_mutants, record

ROOT = Path(__file__).parent.parent
MUTANTS = read_mutants(LIST.read_text())
FILES = sorted({mutant.file for mutant in MUTANTS})


@pytest.mark.parametrize("file", FILES)
def test_mutants_of_a_file_can_be_applied(file: str) -> None:
    text = broken = (ROOT / SOURCE / file).read_text()
    for mutant in [each for each in MUTANTS if each.file == file]:
        mutant.applied(text)
        broken = broken.replace(mutant.old, mutant.new)
    ast.parse(broken)  # with all of them: once for each takes seconds


def test_there_are_enough_of_them_and_no_two_are_alike() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) > 300


def test_they_are_of_all_packages() -> None:
    packages = {path.name for path in (ROOT / SOURCE).iterdir() if not path.name.startswith("__")} - {
        "py.typed"
    }
    assert {mutant.package for mutant in MUTANTS} <= set(TESTS) <= packages


def test_the_tests_it_names_exist() -> None:
    named = {name for mutant in MUTANTS for name in mutant.nearest} | {
        n for names in TESTS.values() for n in names
    }
    assert not [name for name in sorted(named) if not (ROOT / "tests" / name).exists()]


TWO = """\
# a comment
== a.py: engine/test_events.py
- x = 1
-     y = 2
+ x = 2
> tests/a.py::test_a, 3 s
- z
+ w
"""


def test_the_list_is_read_as_it_is_written() -> None:
    nearest = ["engine/test_events.py"]
    assert read_mutants(TWO) == [
        Mutant(1, "a.py", nearest, "x = 1\n    y = 2", "x = 2", "tests/a.py::test_a, 3 s", 5),
        Mutant(2, "a.py", nearest, "z", "w", "", 8),
    ]


def test_outcomes_are_recorded_in_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "LIST", tmp_path / "list.txt")
    mutants.LIST.write_text(TWO)
    for mutant, outcome in zip(read_mutants(TWO), ("survived", "tests/b.py::test_b, 1 s"), strict=True):
        record(mutant, outcome)
    expected = TWO.replace("tests/a.py::test_a, 3 s", "survived") + "> tests/b.py::test_b, 1 s\n"
    assert mutants.LIST.read_text() == expected


def test_a_text_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs 2 times"):
        Mutant(1, "a.py", [], "x", "y", "", 0).applied("x = x")
