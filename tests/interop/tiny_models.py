"""Tiny Hugging Face language models with random weights, batches for them, and training in one process.

What every framework's jobs note of a model is here as well."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
import torch.distributed as dist
from reference import full
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import shardwise
from shardwise.interop import installed

LIBRARIES = ("ours", "peer")
RANKS, ROWS, LENGTH, VOCABULARY = 2, 2, 6, 33
NORM = 0.5  # that gradients are clipped to
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


def tokenizer() -> PreTrainedTokenizerFast:
    """Of the words w0, w1, ..."""
    words = [*(f"w{i}" for i in range(VOCABULARY - 2)), "<pad>", "<eos>"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    splitting = tokenizers.Tokenizer(model)
    splitting.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=splitting, pad_token="<pad>", eos_token="<eos>")


def texts(seed: int) -> Iterator[str]:
    """Of two to six words each."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        length = int(torch.randint(2, 7, (), generator=generator))
        words = torch.randint(VOCABULARY - 2, (length,), generator=generator)
        yield " ".join(f"w{word}" for word in words.tolist())


class OnCpu:
    """Mixed into a Trainer of transformers: trains with FSDP on the CPU too, where Accelerate turns it off silently."""

    def create_accelerator_and_postprocess(self: Any) -> None:
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

        AcceleratorState._reset_state()
        GradientState._reset_state()
        with patch("accelerate.ParallelismConfig._validate_accelerator"):  # which refuses CPUs
            super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is not None:
            state = self.accelerator.state
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True
            assert self.accelerator.is_fsdp2


def arguments(folder: Path, steps: int, *, fsdp: bool | None = None) -> dict[str, Any]:
    """Of a Trainer: FSDP2 on `RANKS` ranks, or one process with the rows of all; no decay, no shuffling."""
    ranks = int(os.environ["WORLD_SIZE"])
    config = {"fsdp": True, "fsdp_config": {"version": 2, "cpu_ram_efficient_loading": False}}
    return (config if (ranks > 1 if fsdp is None else fsdp) else {}) | {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": ROWS * RANKS // ranks,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": NORM,
        "optim": "adamw_torch",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }


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


def own(rows: Tensor) -> Tensor:
    """Those of this rank; all of them in one process."""
    return rows.chunk(RANKS)[dist.get_rank()] if dist.is_initialized() else rows


def mean_of_ranks(value: Tensor) -> Tensor:
    """As a number of the global batch; the value itself in one process."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= RANKS
    return value


def facts(model: Any) -> dict[str, Any]:
    is_ours = [isinstance(each, shardwise.FSDPModule) for each in (model, *model.model.layers)]
    return {"ours": is_ours, "weights": whole(model)}


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
