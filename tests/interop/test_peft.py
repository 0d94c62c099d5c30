"""PEFT's adapters train as in one process, over frozen weights of any kind, and are saved in one way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("peft")
pytest.importorskip("transformers")

import torch.distributed.fsdp as peer
from expecttest import assert_expected_inline
from launch import run_job
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from reference import full
from refusals import wrapped
from safetensors.torch import load_file
from tiny_models import LIBRARIES, Weights, assert_same, global_batch, loss_of, rows_of, tiny_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise

STEPS = 3
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT's use


def with_adapters(base: Any, *, dora: bool = False) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], use_dora=dora)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # begins with zeros, which would hide the other factor
            nn.init.normal_(param, std=0.1)
        if param.requires_grad:
            param.data = param.data.to(base.lm_head.weight.dtype)
    return model


def trained(model: Any, tokens: Callable[[int], Tensor]) -> None:
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        loss_of(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- models ---------------------------------------------------------------------------------------


def in_nf4() -> Any:
    """All linear layers of the blocks in torchao's NF4, with the least blocks that two ranks can share."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    base = tiny_llama().float()
    for module in base.model.layers.modules():
        if isinstance(module, nn.Linear):
            value = to_nf4(module.weight.detach(), 32, module.weight.numel() // 64)
            module.weight = nn.Parameter(value, requires_grad=False)
    return base


class BytesLinear(nn.Module):
    """A frozen layer in the form of bitsandbytes: a byte for each weight, and a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        value = linear.weight.detach()
        scale = value.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((value / scale + 128).round().to(torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight.to(x.dtype) - 128) * self.scale)


def in_bytes() -> Any:
    base = tiny_llama()
    for layer in base.model.layers:
        for name in ("k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, BytesLinear(getattr(layer.self_attn, name)))
    return base


MODELS: dict[str, Callable[[], Any]] = {
    "lora": lambda: with_adapters(tiny_llama()),
    "dora": lambda: with_adapters(tiny_llama(), dora=True),
    "nf4": lambda: with_adapters(in_nf4()),
    "bytes": lambda: with_adapters(in_bytes()),
    "later": lambda: with_adapters(tiny_llama()),
}
KINDS = list(MODELS)


def shard(model: Any, library: str) -> None:
    if library == "ours":
        shardwise.shard_model(model, wrap={LlamaDecoderLayer})
        return
    core = model.get_base_model() if isinstance(model, PeftModel) else model
    for layer in core.model.layers:
        peer.fully_shard(layer)
    peer.fully_shard(model)


def sharded(kind: str, library: str) -> Any:
    if kind != "later":
        model = MODELS[kind]()
        shard(model, library)
        return model
    base = tiny_llama()
    shard(base, library)
    model = with_adapters(base)
    shard_adapters(model, shardwise.fully_shard if library == "ours" else peer.fully_shard)
    return model


def shard_adapters(model: Any, fully_shard: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
                fully_shard(factor)


# --- jobs -----------------------------------------------------------------------------------------


def fine_tuning(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for library in LIBRARIES:
        for kind in KINDS:
            model = sharded(kind, library)
            trained(model, lambda step: rows_of(step, dist.get_rank()))
            found[f"{library} {kind}"] = adapters(model)
            if library == "ours":
                state = shardwise.full_state_dict(model, rank0_only=True)
                if dist.get_rank() == 0:
                    model.save_pretrained(folder / kind, state_dict=state)
                dist.barrier()
        found[f"{library} forgotten"] = forgotten(library)
    return found


def forgotten(library: str) -> str:
    base = tiny_llama()
    shard(base, library)
    model = with_adapters(base)
    try:
        trained(model, lambda step: rows_of(step, dist.get_rank()))
    except RuntimeError as error:
        return str(error)
    own = torch.cat([value.flatten() for value in adapters(model).values()])
    first, second = own.clone(), own.clone()
    dist.broadcast(first, 0)
    dist.broadcast(second, 1)
    return "ranks agree" if torch.equal(first, second) else "ranks differ"


def adapters(model: Any) -> Weights:
    return {name: full(param).detach() for name, param in model.named_parameters() if "lora_" in name}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peft")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Any:
    return run_job(fine_tuning, folder)


def in_one_process(kind: str) -> Any:
    model = MODELS[kind]()
    trained(model, global_batch)
    return model


def assert_as_precise(found: Weights, expected: Weights, kind: str) -> None:
    if kind == "nf4":  # dequantises to float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_in_one_process(tuned: Any, kind: str, library: str) -> None:
    found = tuned[f"{library} {kind}"]
    assert found
    assert_as_precise(found, adapters(in_one_process(kind)), kind)


def test_adapters_that_no_group_reduces_are_refused(tuned: Any) -> None:
    assert_expected_inline(
        wrapped(tuned["ours forgotten"]),
        """\
model.layers.0.self_attn.q_proj.lora_A.default.weight,
model.layers.0.self_attn.q_proj.lora_B.default.weight,
model.layers.0.mlp.down_proj.lora_A.default.weight,
model.layers.0.mlp.down_proj.lora_B.default.weight: these parameters
were added after fully_shard (group 'model.layers.0'). No group
reduces the gradients, so they would stay this rank's own and the
ranks would drift apart. Add parameters before fully_shard, call
fully_shard on the new module, or freeze what is not to be trained.""",
    )
    assert tuned["peer forgotten"] == "ranks differ"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_adapters_are_read_and_merged_by_peft(tuned: Any, folder: Path, kind: str) -> None:
    assert all("lora" in name for name in load_file(folder / kind / "adapter_model.safetensors"))
    expected = in_one_process(kind)
    bases = {"nf4": in_nf4, "bytes": in_bytes}
    base = bases.get(kind, tiny_llama)()
    read = PeftModel.from_pretrained(base, folder / kind, autocast_adapter_dtype=False)
    read = read if kind == "nf4" else read.double()
    tokens = global_batch(9)
    models = [(read, expected)]
    if kind != "nf4":
        models.append((read.merge_and_unload(), expected.merge_and_unload()))
    for ours, plain in models:
        torch.testing.assert_close(ours(input_ids=tokens).logits, plain(input_ids=tokens).logits)
