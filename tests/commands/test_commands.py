"""`python -m shardwise`: which commands there are, and what they share."""

import importlib
import sys

import pytest
from expecttest import assert_expected_inline

from shardwise.__main__ import LEAD_S, main
from shardwise.commands import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does_and_how_it_is_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    module = importlib.import_module(f"shardwise.commands.{name}")
    assert module.__doc__.strip() in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, purpose in COMMANDS.items():
        assert f"{name} " in shown
        assert purpose in " ".join(shown.split())


def test_a_command_is_imported_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMMANDS:
        monkeypatch.delitem(sys.modules, f"shardwise.commands.{name}", raising=False)
    assert main(["doctor", "--help"]) == 0
    imported = [name for name in COMMANDS if f"shardwise.commands.{name}" in sys.modules]
    assert imported == ["doctor"]


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doktor"]) == 2
    assert "invalid choice: 'doktor'" in capsys.readouterr().err


def test_what_cannot_work_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--timeout", "0"]) == 2
    assert_expected_inline(
        capsys.readouterr().err,
        """\
python -m shardwise doctor: --timeout is 0; give seconds to wait.
""",
    )


@pytest.mark.parametrize("words", [["--help"], ["doktor"], ["doctor", "--timeout", "0"]])
def test_of_several_ranks_the_first_prints(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    printed, status = {}, {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        status[rank] = main(words)
        printed[rank] = "".join(capsys.readouterr())
    assert "python -m shardwise" in printed["0"]
    assert printed["1"] == ""
    assert status["0"] == status["1"] == (0 if "--help" in words else 2)
    assert waits == ([LEAD_S] if status["1"] else [])


def test_a_rank_that_does_not_find_the_others_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert main(["doctor"]) == 2
    assert_expected_inline(
        capsys.readouterr().err,
        """\
python -m shardwise doctor: this rank has not met the others (RANK=1, WORLD_SIZE=, MASTER_ADDR=, MASTER_PORT=): Error initializing torch.distributed using env:// rendezvous: environment variable WORLD_SIZE expected, but not set. Start all of them, and look at the address and at firewalls.
""",
    )
