"""Accelerate's FSDP2 plugin trains on our shards, after one call, as one process does; the peer beside it.

Accelerate turns FSDP off on the CPU without a word, and trains with DDP. So these jobs tell it the type by hand,
and each asserts whose modules it trains.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from launch import result_of, run_job
from tiny_models import (
    LIBRARIES,
    adamw,
    assert_same,
    facts,
    loss_of,
    named,
    plain_weights,
    rows_of,
    tiny_llama,
)

NORM = 0.5


def accelerator_of(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accumulation = options.pop("gradient_accumulation_steps", 1)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        **{"cpu_ram_efficient_loading": False, "state_dict_type": "SHARDED_STATE_DICT"} | options,
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # which the state takes up again
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    return accelerator


def prepared(accelerator: Accelerator, model: Any) -> tuple[Any, Any]:
    return accelerator.prepare(model, adamw(model))


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    norms = []
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, rows_of(step, accelerator.process_index)))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), NORM)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def training(folder: Path) -> dict[str, Any]:
    found = {}
    for library in LIBRARIES:
        with named(library):
            accelerator = accelerator_of(gradient_accumulation_steps=2)
            model, optimizer = prepared(accelerator, tiny_llama())
            norms = train(accelerator, model, optimizer, range(6))
            model.eval()
            with torch.no_grad():
                logits = model(input_ids=rows_of(9, accelerator.process_index)).logits
            found[library] = facts(model) | {"norms": norms, "logits": accelerator.gather_for_metrics(logits)}
    return found


trained = result_of(training)


def test_it_trains_on_our_modules(trained: Any) -> None:
    assert {library: found["ours"] for library, found in trained.items()} == {
        "ours": [True] * 3,
        "peer": [False] * 3,
    }


@pytest.mark.parametrize("library", LIBRARIES)
def test_it_trains_as_one_process_does(trained: Any, library: str) -> None:
    assert_same(trained[library]["weights"], plain_weights(3, 2, NORM))


def test_norms_and_outputs_are_those_of_the_peer(trained: Any) -> None:
    assert trained["ours"]["norms"] == pytest.approx(trained["peer"]["norms"], rel=1e-12)
    torch.testing.assert_close(trained["ours"]["logits"], trained["peer"]["logits"], rtol=1e-9, atol=1e-11)


def resuming(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for library in LIBRARIES:
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            with named(library):
                accelerator = accelerator_of(state_dict_type=kind)
                model, optimizer = prepared(accelerator, tiny_llama())
                train(accelerator, model, optimizer, range(2))
                accelerator.save_state(str(folder / f"{library}-{kind}"))

                accelerator = accelerator_of(state_dict_type=kind)
                model, optimizer = prepared(accelerator, tiny_llama())
                train(accelerator, model, optimizer, range(7, 8))  # other weights than those saved
                accelerator.load_state(str(folder / f"{library}-{kind}"))
                train(accelerator, model, optimizer, range(2, 4))
                found[f"{library} {kind}"] = facts(model) | {"exported": accelerator.get_state_dict(model)}
    return found


def test_it_saves_and_resumes(tmp_path: Path) -> None:
    expected = plain_weights(4, max_norm=NORM)
    for case, found in run_job(resuming, tmp_path).items():
        assert found["ours"] == [case.startswith("ours")] * 3
        assert_same(found["weights"], expected)
        assert_same(found["exported"], expected)


def sharded_before(how: str) -> Any:
    model = tiny_llama()
    for layer in model.model.layers:
        torch.distributed.fsdp.fully_shard(layer)
    return torch.distributed.fsdp.fully_shard(model) if how == "whole" else model


VARIANTS = {
    "weights of rank 0 alone": {"cpu_ram_efficient_loading": True},
    "activations recomputed": {"activation_checkpointing": True},
    "shards in host memory": {"cpu_offload": True},
    "gradients kept whole": {"reshard_after_forward": False},
    "sharded before: whole": {},
    "sharded before: blocks": {},
}


def variants(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for library in LIBRARIES:
        for case, options in VARIANTS.items():
            with named(library):
                accelerator = accelerator_of(**options)
                _, is_sharded, how = case.partition(": ")
                model = sharded_before(how) if is_sharded else tiny_llama()
                try:
                    model, optimizer = prepared(accelerator, model)
                    train(accelerator, model, optimizer, range(2))
                    found[f"{library}, {case}"] = facts(model)
                except (ValueError, RuntimeError) as error:
                    found[f"{library}, {case}"] = str(error)
    return found


varied = result_of(variants)


@pytest.mark.parametrize("case", VARIANTS)
def test_its_options_train_as_one_process_does(varied: Any, case: str) -> None:
    found = varied[f"ours, {case}"]
    assert found["ours"] == [True] * 3
    assert_same(found["weights"], plain_weights(2, max_norm=NORM))


@pytest.mark.parametrize("case", [case for case in VARIANTS if case.startswith("sharded before")])
def test_accelerate_finds_no_class_by_name_in_what_the_peer_has_sharded(varied: Any, case: str) -> None:
    assert "Could not find the transformer layer class LlamaDecoderLayer" in varied[f"peer, {case}"]
