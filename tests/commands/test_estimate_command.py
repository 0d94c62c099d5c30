"""`python -m shardwise estimate`: what it prints, writes and refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from models import Tower

from shardwise.__main__ import main
from shardwise.commands import estimate as estimate_command

WORDS = [
    *("estimate", "test_estimate_command:build", "--world", "8", "--strategy", "zero3"),
    *("--batch", "4x512:fp32"),
]


def build() -> Tower:
    return Tower(width=512, hidden=1024, depth=2)


def build_list() -> list[Tower]:
    return [build()]


def test_it_prints_a_table_and_writes_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "found.json"), "--picture", str(tmp_path / "found.png")]
    assert main([*WORDS, "--mp", "bf16", "--memory", "1GB", "--checkpointing", "yes", *files]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1 fit in 1.00 GB; zero3 with checkpointing sends least of them." in shown
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert f"{row['peaks']['backward']['bytes'] / 1e6:,.2f}" in shown
    assert (tmp_path / "found.png").stat().st_size > 5000


def test_inputs_of_blocks_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--checkpointing", "offload"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("zero3")]
    assert row.split()[2] == "offloaded"


def test_the_model_of_a_config_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--world", "4", "--strategy", "zero3", "--batch", "2x16", "--checkpointing", "no"]
    figures = tmp_path / "found.json"
    for model in (tmp_path, tmp_path / "config.json"):
        assert main(["estimate", str(model), *options, "--json", str(figures)]) == 0
        found = json.loads(figures.read_text())
        block = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
        assert found["num_parameters"] == 2 * 100 * 64 + 2 * block + 64
        assert found["rows"][0]["activations"] > 2 * 16 * 100 * 4, "logits, as the labels make a loss"


def test_its_status_is_1_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--memory", "1MB", "--checkpointing", "no"]) == 1
    printed = capsys.readouterr()
    assert "None fits in 1.00 MB" in printed.out
    assert printed.err == "", "progress is for terminals"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({1: "nowhere:build"}, "importing 'nowhere' from"),
        ({1: "./nowhere/config.json"}, "no model could be made of './nowhere/config.json'"),
        ({1: "jobs/train.py:build"}, "names a file. Pass the name of its module: jobs.train:build."),
        ({1: "test_estimate_command"}, "names no function. Pass MODULE:FUNCTION"),
        ({1: "test_estimate_command:no"}, "has no function 'no'"),
        ({1: "test_estimate_command:build_list"}, "() returned a list; return a model (an nn.Module)"),
        ({1: "test_estimate_command:pytest"}, "() raised TypeError: 'module' object is not callable"),
        ({3: "0"}, "world is '0'"),
        ({7: "4x3:fp32"}, "forward of the Tower failed on tensors like the batch, float32 (4, 3)"),
    ],
)
def test_what_cannot_work_is_told_in_a_line(
    changed: dict[int, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [changed.get(index, word) for index, word in enumerate(WORDS)]
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_batch_that_does_not_fit_is_told_in_one_line() -> None:
    """Also what torch logs by itself."""
    words = ["estimate", "test_estimate_command:build", *WORDS[2:7], "4x3:fp32"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *words],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


@pytest.mark.parametrize(
    ("picture", "message"),
    [("nowhere/found.png", "there is no folder"), ("found.abc", "names no format that matplotlib can write")],
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    picture: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate_command, "estimate", None)
    assert main([*WORDS, "--picture", picture]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["matplotlib.figure", "matplotlib.backends.backend_agg"])
def test_what_keeps_matplotlib_from_being_imported_is_told_before_the_work(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate_command, "estimate", None)
    monkeypatch.delitem(sys.modules, "shardwise.planning.picture", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert main([*WORDS, "--picture", "found.png"]) == 2
    told = capsys.readouterr().err
    assert (
        f"--picture: a picture needs matplotlib, which cannot be imported: import of {module} halted" in told
    )
    assert "pip install 'shardwise[pictures]'" in told


def test_help_lists_strategies_and_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ddp, zero1, zero2, zero3, zero3_hpz, hybrid, hybrid_zero2; default: all" in shown
    assert "adamw, adam, sgd, sgd-momentum," in shown


def test_progress_goes_to_stderr_where_that_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main([*WORDS, "--checkpointing", "no"]) == 0
    assert "zero3:   0%|" in capsys.readouterr().err


def test_a_module_that_trains_when_imported_is_told_how_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trains_at_once.py").write_text("import torch\ntorch.distributed.init_process_group()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["estimate", "trains_at_once:build", *WORDS[2:]]) == 2
    told = capsys.readouterr().err
    assert re.search("importing 'trains_at_once' from .* raised ValueError", told)
    assert "if __name__ == '__main__':" in told
