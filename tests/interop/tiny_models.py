"""Tiny language models of Hugging Face with random weights, batches for them, and training in one process.

What every framework's jobs note of a model is here as well."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from reference import full
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from shardwise.interop import installed

LIBRARIES = ("ours", "peer")
RANKS, ROWS, LENGTH, VOCABULARY = 2, 2, 6, 33
Weights = dict[str, Tensor]


def named(library: str) -> AbstractContextManager[None]:
    """Inside, torch's names stand for this library of `LIBRARIES`."""
    return installed() if library == "ours" else nullcontext()


def tiny_llama(**options: object) -> LlamaForCausalLM:
    """The same weights at every call, in float64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        **options,
    )
    return LlamaForCausalLM(config).double()


def global_batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (RANKS * ROWS, LENGTH), generator=generator)


def rows_of(step: int, rank: int) -> Tensor:
    return global_batch(step)[rank * ROWS : (rank + 1) * ROWS]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over tokens, computed here: frameworks differ in what they average."""
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Without decay, from which frameworks exempt some weights."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


def plain_weights(steps: int, microbatches: int = 1, max_norm: float | None = None) -> Weights:
    """What one process comes to, on the batches of all ranks."""
    model = tiny_llama()
    optimizer = adamw(model)
    for step in range(steps):
        for part in range(microbatches):
            (loss_of(model, global_batch(step * microbatches + part)) / microbatches).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def whole(model: nn.Module) -> Weights:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): full(param)
        for name, param in model.named_parameters()
    }


def facts(model: Any) -> dict[str, Any]:
    is_ours = [isinstance(each, shardwise.FSDPModule) for each in (model, *model.model.layers)]
    return {"ours": is_ours, "weights": whole(model)}


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
