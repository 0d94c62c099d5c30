"""TRL's trainers train on our shards as in one process: on texts, on pairs, and on texts that they generate."""

import os
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("trl")

import trl
from datasets import Dataset
from launch import result_of
from tiny_models import (
    RANKS,
    ROWS,
    VOCABULARY,
    OnCpu,
    arguments,
    assert_same,
    facts,
    texts,
    tiny_llama,
    tokenizer,
)
from transformers import LlamaForSequenceClassification

from shardwise.interop import install

STEPS, NEW_TOKENS = 3, 4
# What a trainer is called and what its rows hold. Of these, only RewardTrainer computes its loss in float64.
COLUMNS = {
    "SFT": ("text",),
    "DPO": ("prompt", "chosen", "rejected"),
    "Reward": ("chosen", "rejected"),
    "GRPO": ("prompt",),
}


def rows_with(columns: tuple[str, ...]) -> Dataset:
    """For all steps of all ranks."""
    drawn = texts(0)
    return Dataset.from_list([{name: next(drawn) for name in columns} for _ in range(STEPS * RANKS * ROWS)])


def mean_word(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [sum(int(word[1:]) for word in text.split()) / NEW_TOKENS for text in completions]


def llama_with_reward() -> Any:
    model = LlamaForSequenceClassification(tiny_llama(num_labels=1, pad_token_id=VOCABULARY - 2).config)
    model.load_state_dict(tiny_llama().state_dict(), strict=False)
    return model.double()


def trainer_of(kind: str, folder: Path) -> Any:
    model = llama_with_reward() if kind == "Reward" else tiny_llama()
    more: dict[str, Any] = {}
    options = arguments(folder, STEPS) | {"bf16": False}
    if kind == "DPO":
        more = {"ref_model": tiny_llama()}
    if kind == "GRPO":  # one group of completions, half of it on each rank
        more = {"reward_funcs": mean_word}
        options |= {"num_generations": RANKS * ROWS, "shuffle_dataset": False}
        options |= {"max_completion_length": NEW_TOKENS, "generation_kwargs": {"min_new_tokens": NEW_TOKENS}}
    trainer = type("Trainer", (OnCpu, getattr(trl, f"{kind}Trainer")), {})
    return trainer(
        model=model,
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=rows_with(COLUMNS[kind]),
        processing_class=tokenizer(),
        **more,
    )


_draws = count()


def draw(probabilities: Tensor, num_samples: int) -> Tensor:
    """Stands for ``torch.multinomial``: what a row draws does not depend on the rank that has it."""
    generator = torch.Generator().manual_seed(next(_draws))
    noise = torch.rand(RANKS * ROWS, VOCABULARY, dtype=torch.float64, generator=generator)
    first = int(os.environ["RANK"]) * len(probabilities)
    gumbel = -(-noise[first : first + len(probabilities)].log()).log()
    return (probabilities.log() + gumbel).argmax(1, keepdim=True)


@patch("torch.multinomial", draw)
def training(folder: Path) -> dict[str, Any]:
    install()
    found: dict[str, Any] = {}
    for kind in COLUMNS:
        trainer = trainer_of(kind, folder)
        trainer.train()
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        found[kind] = facts(trainer.model) | {"losses": losses}
    return found


plain = result_of(training, ranks=1)


sharded = result_of(training)


@pytest.mark.parametrize("kind", COLUMNS)
def test_it_trains_as_in_one_process(sharded: Any, plain: Any, kind: str) -> None:
    found, expected = sharded[kind], plain[kind]
    assert found["ours"] == [True] * 3
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6, abs=1e-6)
    if kind == "Reward":
        assert_same(found["weights"], expected["weights"])
    else:  # after three steps of 1e-2
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=5e-6)
