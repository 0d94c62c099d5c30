"""`python -m shardwise`: which commands there are, and what they share."""

import importlib
import sys

import pytest
from expecttest import assert_expected_inline

from shardwise.__main__ import main
from shardwise.commands import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does_and_how_it_is_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    module = importlib.import_module(f"shardwise.commands.{name}")
    assert module.__doc__.strip() in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    for name, purpose in COMMANDS.items():
        assert f"{name} " in shown
        assert purpose in " ".join(shown.split())


def test_a_command_is_imported_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMMANDS:
        monkeypatch.delitem(sys.modules, f"shardwise.commands.{name}", raising=False)
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", "--help"])
    imported = [name for name in COMMANDS if f"shardwise.commands.{name}" in sys.modules]
    assert imported == ["doctor"]


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doktor"])
    assert "invalid choice: 'doktor'" in capsys.readouterr().err


def test_what_cannot_work_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "99")
    assert main(["doctor", "--device", "cuda"]) == 2
    assert_expected_inline(
        capsys.readouterr().err.replace("has 0", "has N"),
        """\
python -m shardwise doctor: rank 0 is number 99 on its machine, which has N devices. Start one process for each device.
""",
    )
