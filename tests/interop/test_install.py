"""The names of torch's fully_shard stand for this library while it is installed, and for torch's before and after."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed._composable.fsdp as composable
import torch.distributed.fsdp as peer
from expecttest import assert_expected_inline
from harness import World
from models import Tower, built, random_batch
from on_ranks import on_ranks
from reference import full
from refusals import wrapped
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import shardwise
from shardwise import interop
from shardwise.interop.install import OURS
from shardwise.interop.pipelines import InstalledStage

TORCHS = {ours.__name__: getattr(peer, ours.__name__) for ours in OURS if hasattr(peer, ours.__name__)}


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    yield
    interop.uninstall()


def framework(**names: Any) -> ModuleType:
    module = ModuleType("framework_of_this_test")
    vars(module).update(names)
    sys.modules[module.__name__] = module
    return module


@pytest.fixture
def imported_before() -> Iterator[ModuleType]:
    yield framework(shard=TORCHS["fully_shard"], FSDPModule=TORCHS["FSDPModule"])
    del sys.modules["framework_of_this_test"]


def test_every_name_of_the_peer_is_replaced_and_put_back() -> None:
    with interop.installed():
        for name, theirs in TORCHS.items():
            assert getattr(peer, name) is not theirs
            assert getattr(peer, name).__doc__ == getattr(shardwise, name).__doc__
        assert composable.fully_shard is peer.fully_shard
        assert sys.modules["torch.distributed._composable.fsdp.fully_shard"].FSDPModule is peer.FSDPModule
    assert {name: getattr(peer, name) for name in TORCHS} == TORCHS
    assert composable.fully_shard is TORCHS["fully_shard"]


def test_the_stage_of_pipelines_is_replaced_and_put_back() -> None:
    module = framework(PipelineStage=pipelining.PipelineStage)
    theirs = pipelining.PipelineStage
    with interop.installed():
        assert pipelining.PipelineStage is module.PipelineStage is not theirs
        assert issubclass(pipelining.PipelineStage, InstalledStage)
        assert getattr(schedules, "PipelineStage", theirs) is theirs  # torch 2.11 does not import it there
    assert pipelining.PipelineStage is module.PipelineStage is theirs


def test_names_that_a_module_has_imported_are_replaced_and_put_back(imported_before: ModuleType) -> None:
    with interop.installed():
        assert imported_before.shard is peer.fully_shard
        assert imported_before.FSDPModule is peer.FSDPModule
    assert imported_before.shard is TORCHS["fully_shard"]
    assert imported_before.FSDPModule is TORCHS["FSDPModule"]


def test_a_module_that_imported_meanwhile_gets_torchs_back_and_one_of_ours_keeps_ours() -> None:
    interop.install()
    module = framework(shard=peer.fully_shard, ours=shardwise.fully_shard, Ours=shardwise.FSDPModule)
    interop.uninstall()
    assert module.shard is TORCHS["fully_shard"]
    assert (module.ours, module.Ours) == (shardwise.fully_shard, shardwise.FSDPModule)


def test_installing_again_reaches_modules_loaded_since_and_the_inner_block_leaves_it_installed() -> None:
    interop.install()
    module = framework(shard=TORCHS["fully_shard"])  # had it from elsewhere
    with interop.installed():
        assert module.shard is peer.fully_shard
    assert peer.fully_shard is not TORCHS["fully_shard"]


def test_it_says_once_what_it_replaced(imported_before: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardwise")
    interop.install()
    interop.install()
    (message,) = caplog.messages
    assert message.startswith("shardwise took the place of torch's fully_shard: ")
    assert "framework_of_this_test: FSDPModule, shard;" in message


def test_policies_of_either_library_are_known_by_torchs_names() -> None:
    """A framework may have been given torch's before, and makes its own by the name."""
    before = peer.CPUOffloadPolicy(), peer.OffloadPolicy(), peer.MixedPrecisionPolicy()
    with interop.installed():
        assert [isinstance(each, peer.OffloadPolicy) for each in before] == [True, True, False]
        assert [isinstance(each, peer.CPUOffloadPolicy) for each in before] == [True, False, False]
        assert isinstance(before[2], peer.MixedPrecisionPolicy)
        made = peer.MixedPrecisionPolicy(torch.bfloat16, full_precision=nn.LayerNorm)
        assert made == shardwise.MixedPrecisionPolicy(torch.bfloat16, full_precision=nn.LayerNorm)
        assert isinstance(made, peer.MixedPrecisionPolicy)
        assert isinstance(peer.CPUOffloadPolicy(), peer.OffloadPolicy)
        assert issubclass(peer.CPUOffloadPolicy, peer.OffloadPolicy)
        assert not issubclass(peer.OffloadPolicy, peer.CPUOffloadPolicy)


def test_a_class_derived_from_a_stand_in_is_a_class_of_its_own() -> None:
    with interop.installed():

        class Own(peer.CPUOffloadPolicy):
            """A policy of the caller's."""

    assert type(Own()) is Own
    assert not isinstance(shardwise.CPUOffloadPolicy(), Own)
    assert isinstance(Own(), shardwise.CPUOffloadPolicy)


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        model(random_batch(index, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def plain_tower() -> Tower:
    return built(Tower, seed=0)


def trained_by_torchs_names(policies: str, installed: bool) -> dict[str, Any]:
    """Two steps of a framework that knows torch's names alone; its policies were made before or meanwhile."""
    made = peer.MixedPrecisionPolicy(reduce_dtype=torch.float64), peer.CPUOffloadPolicy(pin_memory=False)
    if installed:
        interop.install()
    try:
        if policies == "made meanwhile":
            made = (
                peer.MixedPrecisionPolicy(reduce_dtype=torch.float64),
                peer.CPUOffloadPolicy(pin_memory=False),
            )
        model = plain_tower()
        for block in model.blocks:
            peer.fully_shard(block, mp_policy=made[0], offload_policy=made[1])
        peer.fully_shard(model, mp_policy=made[0], offload_policy=made[1])
        peer.register_fsdp_forward_method(model, "forward")
        known = [isinstance(module, peer.FSDPModule) for module in (model, *model.blocks, model.inlet)]
        trained(model)
    finally:
        interop.uninstall()
    return {
        "ours": isinstance(model, shardwise.FSDPModule),
        "known": known,
        "still known": isinstance(model, peer.FSDPModule),
        "weights": {name: full(param) for name, param in model.named_parameters()},
    }


@pytest.mark.parametrize("policies", ["made before", "made meanwhile"])
def test_code_that_knows_torchs_names_trains_on_our_shards(world2: World, policies: str) -> None:
    ours = world2.run(trained_by_torchs_names, policies, installed=True)[0]
    theirs = world2.run(trained_by_torchs_names, policies, installed=False)[0]
    assert (ours["ours"], theirs["ours"]) == (True, False)
    assert ours["known"] == theirs["known"] == [True, True, True, True, False]
    assert (ours["still known"], theirs["still known"]) == (False, True)
    for name, expected in trained(plain_tower()).state_dict().items():
        torch.testing.assert_close(ours["weights"][name], expected)
        assert torch.equal(ours["weights"][name], theirs["weights"][name]), name


@pytest.mark.parametrize("is_within", [False, True])
@on_ranks(2)
def test_summon_full_params_of_torchs_older_fsdp_summons_ours(is_within: bool) -> None:
    expected = plain_tower().state_dict()
    wrapper = peer.FullyShardedDataParallel
    theirs = wrapper.summon_full_params
    with interop.installed():
        model = plain_tower()
        peer.fully_shard(model.blocks[0] if is_within else model)
        with wrapper.summon_full_params(model, writeback=False):
            kinds = {type(param) for param in model.parameters()}
            shown = {name: param.detach().clone() for name, param in model.named_parameters()}
        with wrapper.summon_full_params(model, True, True), torch.no_grad():
            model.blocks[0].up.weight.mul_(2)
        interop.install()
        with wrapper.summon_full_params(plain_tower()):  # nothing of it is sharded: torch's own
            pass
    found = {
        "kinds": kinds,
        "shown": shown,
        "edited": full(model.blocks[0].up.weight),
        "put back": wrapper.summon_full_params is theirs,
    }
    assert found["kinds"] == {nn.Parameter}
    assert found["shown"].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found["shown"][name], value), name
    assert torch.equal(found["edited"], 2 * expected["blocks.0.up.weight"])
    assert found["put back"]


def offload_as_verl_does(model: Any) -> None:
    """What verl (0.9) runs between phases: `offload_automodel_model_to_cpu`."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    for module in model.modules():
        state = _get_module_fsdp_state(module)
        if state is not None and state._fsdp_param_group is not None:
            state._fsdp_param_group._training_state = TrainingState.IDLE
    model.reshard()
    model.cpu()


@on_ranks(2)
def test_frameworks_that_ask_for_torchs_state_offload_between_phases() -> None:
    expected = trained(trained(plain_tower())).state_dict()
    with interop.installed():
        model = plain_tower()
        for module in (*model.blocks, model):
            peer.fully_shard(module)
        trained(model)
        with torch.no_grad():
            model(random_batch(7, 4))  # leaves the root's parameters unsharded
        offload_as_verl_does(model)
        sharded = [module for module in model.modules() if isinstance(module, peer.FSDPModule)]
        groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]
        trained(model)
        with pytest.raises(AttributeError) as refused:
            model._get_fsdp_state()._auto_reshard_after_forward = False
    assert groups == [None] * 4
    for name, param in model.named_parameters():
        torch.testing.assert_close(full(param), expected[name])
    assert_expected_inline(
        wrapped(str(refused.value)),
        """\
_get_fsdp_state()._auto_reshard_after_forward was set, a field of
torch's FSDP: shardwise has sharded this module, and it would have no
effect. Call the module's own setters, such as
set_reshard_after_forward().""",
    )


@on_ranks(1)
def test_a_model_that_torch_has_sharded_is_known_and_not_sharded_again() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    peer.fully_shard(model[0])
    with interop.installed():
        is_known = isinstance(model[0], peer.FSDPModule)
        with pytest.raises(ValueError, match="torch's fully_shard was already applied"):
            peer.fully_shard(model[0])
    assert is_known


MIXED_IN = """
import torch.distributed.fsdp
from torch.distributed.fsdp import fully_shard
import sys
print(fully_shard.__module__, sys.argv[1:], __name__, sys.path[0], torch.distributed.fsdp.FSDPModule.__mro__[1].__module__)
raise SystemExit(3)
"""


def run_a_script(tmp_path: Any, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(MIXED_IN)
    path = {"PYTHONPATH": str(interop.__path__[0]).rpartition("/shardwise/")[0], "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-m", "shardwise", "run", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=path | environment,
        cwd=tmp_path,
    )


@pytest.mark.processes
def test_a_script_is_run_with_ours_and_told_so(tmp_path: Any) -> None:
    done = run_a_script(tmp_path, str(tmp_path / "script.py"), "--epochs", "3")
    folder = str(tmp_path)
    expected = f"shardwise.fully_shard ['--epochs', '3'] __main__ {folder} shardwise.fsdp_module\n"
    assert (done.returncode, done.stdout) == (3, expected), done.stderr
    assert done.stderr.startswith("shardwise took the place of torch's fully_shard: torch.distributed._")


@pytest.mark.slow
@pytest.mark.processes
def test_torchs_pipelines_keep_torchs_class_whenever_they_are_loaded(tmp_path: Any) -> None:
    """They reach into the state of what they take for torch's modules."""
    text = "import torch.distributed.pipelining.stage as stage; print(stage.FSDPModule.__mro__)"
    (tmp_path / "late.py").write_text(text)
    done = run_a_script(tmp_path, "late.py")
    assert "shardwise" not in done.stdout, done.stderr
    assert "FSDPModule" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_is_run_with_torchs_to_compare(tmp_path: Any) -> None:
    done = run_a_script(tmp_path, "-m", "script", SHARDWISE_INSTALL="0")
    assert done.stdout.startswith("torch.distributed.fsdp [] __main__ "), done.stderr
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_is_not_there_and_a_switch_that_is_none_are_refused(tmp_path: Any) -> None:
    assert "there is no script 'other.py'" in run_a_script(tmp_path, "other.py").stderr
    done = run_a_script(tmp_path, "script.py", SHARDWISE_INSTALL="yes")
    assert "SHARDWISE_INSTALL is 'yes'; set it to 1" in done.stderr
    assert done.returncode == 2
