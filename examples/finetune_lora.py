"""Fine-tune a Hugging Face Llama with LoRA, on shards: its weights are frozen, small adapters learn.

    pip install -e '.[examples,interop]'
    python examples/finetune_lora.py                             # one process
    torchrun --nproc-per-node 2 examples/finetune_lora.py        # the same run, shared by two
    torchrun --nproc-per-node 2 examples/finetune_lora.py --dtype bf16 --rank 16

Frozen weights are sharded as others are, and have no gradients and no state in the optimizer. What is left in
the folder --out:

    adapter/    the adapters alone, which PeftModel.from_pretrained puts onto the base model
    merged/     a model without adapters that computes the same, for LlamaForCausalLM.from_pretrained

The model is built from a config and has random weights, so nothing is downloaded; it learns little from bytes
that its frozen half has never seen. To fine-tune another, load it in `build_model`. For one that no rank has
room for, see docs/guides/lora.md.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, read_corpus, training_loader, validation_loader
from gpt import VOCAB
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from processes import (
    Parser,
    check_above_0,
    check_dtype,
    check_sizes,
    choose_device,
    mean_over_ranks,
    share_of_rank,
    start_processes,
    world_size,
)
from report import History, progress_bar, show_step
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shardwise import clip_grad_norm_, explain, shard_model, unsharded
from shardwise.state import iter_full_parameters, save_safetensors

EVAL_BATCHES = 8
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Set up, fine-tune, save."""
    settings = parse_settings()
    start_processes(settings.device)
    model = shard(build_model(settings))
    corpus = read_corpus()
    if dist.get_rank() == 0:
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        total = sum(param.numel() for param in model.parameters())
        print(f"model   {total:,} parameters, of which {trained:,} are trained, in {settings.dtype}")
        print(f"device  {settings.device_choice}\n\n{explain(model)}\n", flush=True)
    history = train(model, corpus, settings)
    save_adapter(model, settings.out / "adapter")
    validation, _ = validation_loader(corpus, settings, share_of_rank(), EVAL_BATCHES)
    merge(model)
    merged_loss = evaluate(model, validation, settings)
    save_merged(model, settings.out / "merged")
    if dist.get_rank() == 0:
        before, after = history.val_loss
        print(
            f"\nvalidation loss, nats/byte: {before:.4f} before, {after:.4f} after, {merged_loss:.4f} merged"
        )
        print(f"{history.tokens_per_s():,.0f} tokens/s; adapter/ and merged/ are in {settings.out}")
    dist.destroy_process_group()


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; `device` becomes a torch.device."""
    parser = Parser("Fine-tune a small Llama with LoRA, sharded over all processes, on Python's own sources.")
    add = parser.add_argument
    add("--rank", type=int, default=8, help="of the adapters: columns of one factor, rows of the other")
    add("--alpha", type=float, default=16.0, help="adapters are scaled by alpha / rank")
    add("--layers", type=int, default=2, help="number of layers")
    add("--width", type=int, default=64, help="features per position")
    add("--heads", type=int, default=4, help="attention heads; must divide --width")
    add("--context", type=int, default=64, help="bytes the model looks back at most")
    add("--batch", type=int, default=16, help="windows per step, all processes together")
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--lr", type=float, default=1e-2, help="learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="fixes the weights and the batches")
    add(
        "--dtype", choices=["float32", "bf16"], default="float32", help="of frozen weights; adapters: float32"
    )
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto prefers cuda")
    add("--out", type=Path, default=Path("runs/lora"), help="folder for the adapter and the merged model")
    settings = parser.parse_args(arguments)
    with parser.refusing():
        check_above_0(settings, "rank", "alpha", "clip")
        check_sizes(settings, shares=world_size())
        if settings.width // settings.heads % 2:
            raise ValueError("--width / --heads must be even: the model rotates features in pairs")
        if any((settings.out / "merged").glob("*.safetensors")):
            raise ValueError(f"--out {settings.out} holds a merged model: move it, or give another folder")
        settings.device, settings.device_choice = choose_device(settings.device)
        check_dtype(settings.dtype, settings.device)
    return settings


# --- the model ------------------------------------------------------------------------------------


def build_model(settings: argparse.Namespace) -> PeftModel:
    """Build the same model on every rank, frozen except for its adapters."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=settings.width,
        intermediate_size=2 * settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.context,
        initializer_range=1 / math.sqrt(settings.width),
    )
    torch.manual_seed(settings.seed)
    base = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(folder)
    base.to(torch.bfloat16 if settings.dtype == "bf16" else torch.float32)
    lora = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=ADAPTED)
    return get_peft_model(base, lora).to(settings.device)


def shard(model: PeftModel) -> PeftModel:
    """Shard base and adapters together, layer by layer; adapters must be there by then."""
    return shard_model(model, wrap=LlamaDecoderLayer)


# --- training -------------------------------------------------------------------------------------


def train(model: PeftModel, corpus: Corpus, settings: argparse.Namespace) -> History:
    """Run all steps, with a validation before the first and after the last."""
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=settings.lr, weight_decay=0.0)
    validation, unigram = validation_loader(corpus, settings, share_of_rank(), EVAL_BATCHES)
    history = History(unigram, settings.batch * settings.context)
    history.note_validation(evaluate(model, validation, settings))
    with progress_bar(history, settings) as bar:
        for batch in training_loader(corpus, settings, share_of_rank()):
            began = time.perf_counter()
            loss = mean_loss(model, batch, settings.device)
            loss.backward()
            norm = clip_grad_norm_(model, settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            history.note_step(mean_over_ranks(loss), norm.item(), time.perf_counter() - began)
            if history.steps_done == settings.steps:
                history.note_validation(evaluate(model, validation, settings))
            show_step(bar, history)
    return history


def mean_loss(model: Any, windows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Nats per byte over windows that are each (context + 1) bytes long."""
    windows = windows.to(device, non_blocking=True)
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 is too coarse for a loss
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Any, validation: DataLoader, settings: argparse.Namespace) -> float:
    """Validation loss over all ranks."""
    losses = [mean_loss(model, batch, settings.device) for batch in validation]
    return mean_over_ranks(torch.stack(losses).mean())


# --- saving ---------------------------------------------------------------------------------------


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Gather the adapters, and nothing else; rank 0 writes them as PEFT does."""
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    state = {name: value.cpu() for name, value in iter_full_parameters(model, names=names)}
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


def merge(model: PeftModel) -> None:
    """Add the adapters to the frozen weights, so that forward does without them."""
    for layer in model.get_base_model().model.layers:
        with unsharded(layer):  # one at a time; on leaving it, the shards take over what has changed
            for module in layer.modules():
                if isinstance(module, BaseTunerLayer):
                    module.merge()


def save_merged(model: PeftModel, folder: Path) -> None:
    """Take the adapters out and write what is left. All ranks write, and none holds the whole model.

    Afterwards the model cannot be called any more: its root was what has been taken off.
    """
    base = model.unload()
    save_safetensors(base, folder)
    if dist.get_rank() == 0:
        base.config.save_pretrained(folder)


if __name__ == "__main__":
    main()
