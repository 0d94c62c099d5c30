"""Every argument, method, class and warning of FSDP1, FairScale, Lightning and DDP has a row in the documentation.

The tables of its pages about migration say where each is found here, or why it is not needed. Each row names what it is about;
`SHOWN_BY` names a test for each of these names, most of them in other files, and what torch really has is asked
of the installed torch. Training is compared with plain PyTorch in float64 to 1e-10, as everywhere.
"""

import importlib
import inspect
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from harness import World
from models import Block, built, even_tower, random_batch, uneven_tower
from reference import adamw, mean_of_squares
from refusals import assert_says
from scenario import Side, same_as_plain
from strategies import shard_as
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import wrap as peers_wrap
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import (
    CommPolicy,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    no_sync,
    shard_model,
    unsharded,
)
from shardwise.observe import memory_snapshot

TESTS = Path(__file__).parents[1]
PAGES = [TESTS.parent / "docs" / "migrate" / f"{name}.md" for name in ("fsdp1", "fairscale", "ddp")]
HEADING = "## Every name"


# --- the arguments of FSDP1 -----------------------------------------------------------------------


def mesh_of_two_process_groups() -> DeviceMesh:
    shard, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    replicate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    ranks = torch.arange(4).view(2, 2)
    return DeviceMesh.from_group([replicate, shard], "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))


@same_as_plain(4)
def test_two_process_groups_make_a_hybrid_mesh(side: Side) -> None:
    model = built(even_tower)
    if side.is_sharded:
        shard_model(model, mesh=mesh_of_two_process_groups(), strategy="hybrid")
        assert model.blocks[0].up.weight.to_local().numel() == 64
    side.steps(model, adamw(model), range(2))


def kept(strategy: str) -> list[bool]:
    """Whether a block is unsharded after forward, after backward, and after both inside no_sync."""
    model = built(even_tower)
    shard_as(model, strategy)
    found = []
    for context in (nullcontext(), no_sync(model)):
        loss = model(random_batch(0, 4)).sum()
        found.append(memory_snapshot(model.blocks[0]).groups[0].state == "unsharded")
        assert all(isinstance(param, DTensor) for param in (*model.parameters(), model.blocks[0].up.weight))
        with context:
            loss.backward()
        found.append(memory_snapshot(model.blocks[0]).groups[0].state == "unsharded")
        assert isinstance(model.blocks[0].up.weight, DTensor)
    return found


@pytest.mark.parametrize(
    ("strategy", "is_kept"),
    [
        ("zero3", [False, False, False, False]),
        ("zero2", [True, False, True, True]),
        ("zero1", [True, True, True, True]),
        ("ddp", None),
    ],
)
def test_a_strategy_keeps_what_the_peers_keeps_and_shows_shards_between_passes(
    world2: World, strategy: str, is_kept: list[bool] | None
) -> None:
    for found in world2.run(kept, strategy):
        assert is_kept is None or found == is_kept


@same_as_plain(2)
def test_offloaded_gradients_add_up_without_no_sync(side: Side) -> None:
    """Microbatches outside no_sync, of which FSDP1 would keep the last."""
    model = built(uneven_tower)
    if side.is_sharded:
        shard_model(model, offload_policy=CPUOffloadPolicy())
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(3):
            mean_of_squares(model, side.inputs(3 * step + microbatch, 7)).backward()
        side.note_gradients(model)
        if side.is_sharded:
            for param in model.parameters():
                assert {param.to_local().device.type, param.grad.to_local().device.type} == {"cpu"}
        optimizer.step()
    side.note_parameters(model)


def is_a_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def refusal_of_a_custom_policy() -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        shard_model(built(even_tower), wrap=peers_wrap.CustomPolicy(is_a_block))
    return str(caught.value)


def groups_with_settings() -> list[bool]:
    """What a CustomPolicy returns as a dict for some modules. (The last is kept for backward.)"""
    model = shard_model(
        built(even_tower), wrap=is_a_block, overrides={"blocks.0": {"reshard_after_forward": False}}
    )
    model(random_batch(0, 4)).sum()
    return [group.state == "unsharded" for group in memory_snapshot(model.blocks).groups]


def test_settings_of_single_modules_are_overrides(world1: World) -> None:
    (text,) = world1.run(refusal_of_a_custom_policy)
    assert_says(text, "CustomPolicy", "overrides")
    assert world1.run(groups_with_settings) == [[True, False, True]]


# --- the table ------------------------------------------------------------------------------------

THIS = "test_coming_from"
# The name in the table -> where it is shown.
SHOWN_BY: dict[str, str] = {
    name: test
    for names, test in {
        "FullyShardedDataParallel DistributedDataParallel module forward": (
            "test_module_class.test_the_class_is_mixed_once_and_is_both"
        ),
        "process_group": "test_two_process_groups_make_a_hybrid_mesh",
        "device_mesh": "test_equal_meshes.test_parameters_are_on_the_mesh_that_was_given",
        "sharding_strategy ShardingStrategy FULL_SHARD SHARD_GRAD_OP": (
            "test_a_strategy_keeps_what_the_peers_keeps_and_shows_shards_between_passes"
        ),
        "NO_SHARD HYBRID_SHARD _HYBRID_SHARD_ZERO2": (
            "test_strategies.test_each_strategy_has_its_own_placements_and_hybrids_shard_over_the_ranks_of_a_host"
        ),
        "cpu_offload CPUOffload offload_params move_grads_to_cpu": (
            "test_offloaded_gradients_add_up_without_no_sync"
        ),
        "auto_wrap_policy fsdp_auto_wrap_policy ModuleWrapPolicy transformer_auto_wrap_policy "
        "size_based_auto_wrap_policy default_auto_wrap_policy lambda_auto_wrap_policy always_wrap_policy "
        "min_num_params fsdp_modules check_is_root": "test_wrap.test_the_recursion_chooses_what_fsdp1_wraps",
        "CustomPolicy": "test_settings_of_single_modules_are_overrides",
        "enable_wrap wrap": "test_strategies.test_a_module_sharded_before_stays_as_it_is",
        "backward_prefetch BackwardPrefetch BACKWARD_PRE": (
            "test_events.test_from_the_second_step_on_the_next_group_is_unsharded_during_the_computation"
        ),
        "BACKWARD_POST": (
            "test_prefetch.test_after_the_next_group_is_unsharded_once_a_group_is_done_and_freed"
        ),
        "forward_prefetch": "test_prefetch.test_forward_prefetches_whatever_backward_does",
        "limit_all_gathers": "test_prefetch.test_a_list_is_unsharded_as_far_as_the_limit_goes",
        "mixed_precision MixedPrecision param_dtype reduce_dtype cast_forward_inputs compute_dtype "
        "fp32_reduce_scatter": "test_precision.test_each_tensor_has_the_dtype_that_the_policy_names",
        "buffer_dtype": "test_precision.test_floating_buffers_are_cast_and_others_left",
        "keep_low_precision_grads": "test_precision.test_training_equals_a_simulation_of_the_casts",
        "cast_root_forward_inputs": "test_precision.test_each_block_follows_its_own_policy",
        "_module_classes_to_ignore": (
            "test_precision.test_chosen_parameters_stay_in_full_precision_in_the_same_group"
        ),
        "ignored_modules": "test_strategies.test_ignored_modules_are_left_alone",
        "ignored_states": (
            "test_composition.test_without_the_request_an_ignored_gradient_is_the_ranks_own_which_is_warned_of_once"
        ),
        "param_init_fn model_sharded_context": "test_materialize.test_values_are_those_of_one_process",
        "sync_module_states init_sync": (
            "test_sync_module_states.test_ranks_without_values_get_those_of_the_source"
        ),
        "broadcast_buffers forward_sync_buffers": (
            "test_sync_module_states.test_buffers_that_drifted_apart_are_made_equal"
        ),
        "use_orig_params": "test_full_optimizer_state.test_a_plain_run_goes_on_sharded",
        "apply": ("test_unsharded.test_training_after_an_edit_is_as_after_the_same_edit_in_plain_pytorch"),
        "clip_grad_norm_": "test_clipping.test_gradients_are_clipped_as_plain_ones",
        "named_parameters named_buffers": (
            "test_module_class.test_names_order_and_shapes_are_those_of_the_plain_model_at_any_moment"
        ),
        "no_sync": "test_no_sync.test_no_gradient_travels_inside",
        "register_comm_hook": "test_comm_hooks.test_a_hook_written_for_fsdp1_trains_as_the_plain_model",
        "summon_full_params recurse": "test_unsharded.test_recurse_says_which_groups",
        "writeback": "test_unsharded.test_edits_persist_under_every_strategy_and_none_does_without_writeback",
        "offload_to_cpu": "test_unsharded.test_edits_persist_under_every_strategy_and_none_does_without_writeback",
        "with_grads": "test_unsharded.test_gradients_are_seen_whole_and_edited_unless_writeback_is_off",
        "rank0_only": "test_unsharded.test_rank0_only_fills_the_first_rank_alone_gradients_too",
        "state_dict_type set_state_dict_type get_state_dict_type StateDictType StateDictSettings "
        "StateDictConfig SHARDED_STATE_DICT ShardedStateDictConfig use_dtensor state_dict_to_cpu "
        "optim_state_dict sharded_optim_state_dict OptimStateDictConfig ShardedOptimStateDictConfig "
        "LocalOptimStateDictConfig": "test_torch_state_dicts.test_a_run_goes_on",
        "FULL_STATE_DICT FullStateDictConfig": (
            "test_full_state.test_the_full_state_is_that_of_the_plain_model"
        ),
        "LOCAL_STATE_DICT LocalStateDictConfig": (
            "test_module_class.test_the_state_dict_holds_the_sharded_parameters"
        ),
        "full_optim_state_dict FullOptimStateDictConfig rekey_optim_state_dict OptimStateKeyType": (
            "test_full_optimizer_state.test_the_state_by_id_is_that_of_the_plain_optimizer"
        ),
        "optim_state_dict_to_load shard_full_optim_state_dict scatter_full_optim_state_dict "
        "flatten_sharded_optim_state_dict": "test_full_optimizer_state.test_a_plain_run_goes_on_sharded",
        "lazy_bucket_allocation": (
            "test_memory.test_two_groups_of_parameters_are_the_most_and_as_many_of_gradients_or_one"
        ),
        "flatten_parameters gradient_as_bucket_view": ("test_flat_optimizer.test_a_group_is_one_tensor"),
        "reshard_after_forward": "test_settings_of_single_modules_are_overrides",
        "training_step validation_step test_step predict_step setup": (
            "test_inference.test_what_there_is_room_for_travels_once_and_the_others_in_every_forward"
        ),
        "join join_hook join_device join_process_group": (
            "test_inference.test_ranks_may_run_different_numbers_of_forwards"
        ),
        "bucket_cap_mb": "test_strategies.test_neighbours_share_a_group_up_to_the_cap",
        "bucket_cap_mb_list": "test_module.test_modules_of_one_group_are_unsharded_together",
        "find_unused_parameters": "test_composition.test_a_parameter_may_be_unused_on_some_ranks",
        "skip_all_reduce_unused_params": (
            "test_lost_gradients.test_blocks_that_are_not_used_get_no_gradient"
        ),
        "static_graph": "test_events.test_a_new_order_stops_prefetch_and_is_what_the_next_forward_follows",
        "delay_all_reduce_named_params param_to_hook_all_reduce": (
            "test_composition.test_gradients_of_ignored_parameters_are_averaged_on_request"
        ),
    }.items()
    for name in names.split()
}
SHOWN_BY |= {
    "an optimizer built before wrapping": (
        "test_composition.test_an_optimizer_made_before_sharding_says_why_not"
    ),
    "parameters shared between units": (
        "test_composition.test_weights_tied_across_groups_are_one_parameter_with_one_gradient"
    ),
    "frozen and trainable parameters in one unit": (
        "test_lost_gradients.test_freezing_and_thawing_between_steps_is_followed"
    ),
    "forward of a submodule of a unit": (
        "test_forward_methods.test_a_registered_method_trains_as_forward_does"
    ),
    "accumulation outside no_sync with CPU offload": "test_offloaded_gradients_add_up_without_no_sync",
    "parameters changed between forward and backward": (
        "test_steps_between.test_by_default_the_weights_that_backward_begins_with_are_named"
    ),
    "SHARD_GRAD_OP shows full parameters after forward": (
        "test_a_strategy_keeps_what_the_peers_keeps_and_shows_shards_between_passes"
    ),
    "references to parameters saved before": (
        "test_composition.test_weights_that_are_kept_in_a_list_are_not_computed_with_untrained"
    ),
    "parameters renamed after wrapping": (
        "test_changed_parameters.test_what_cannot_be_used_in_place_of_a_parameter_is_refused_with_names"
    ),
    "rank0_only with writeback": "test_unsharded.test_arguments_that_do_not_fit_are_refused",
    "sync_module_states needs a GPU": (
        "test_sync_module_states.test_ranks_without_values_get_those_of_the_source"
    ),
}


def table() -> dict[str, str]:
    texts = [page.read_text() for page in PAGES]
    assert all(text.count(HEADING) == 1 for text in texts), "a page has no such section"
    section = "\n".join(text[text.index(HEADING) + len(HEADING) :].split("\n## ")[0] for text in texts)
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", section, flags=re.MULTILINE)
    named = [(name, here) for there, here in rows for name in re.findall(r"`([^`]+)`", there)]
    names = [name for name, _ in named]
    assert len(set(names)) == len(names), f"twice: {sorted({n for n in names if names.count(n) > 1})}"
    return dict(named)


def arguments_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def public_methods(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def members_of(*enums: Any) -> set[str]:
    return {module_state.name for enum in enums for module_state in enum}


# Of documents whose code is not installed.
OF_1_11 = {"module", "process_group", "cpu_offload", "fsdp_auto_wrap_policy", "backward_prefetch"}
LIGHTNING = (
    "accelerator cpu_offload flatten_parameters reshard_after_forward move_grads_to_cpu fp32_reduce_scatter "
    "compute_dtype bucket_cap_mb min_num_params state_dict_to_cpu parallel_devices cluster_environment "
    "checkpoint_io precision_plugin process_group_backend model_sharded_context training_step "
    "validation_step test_step predict_step setup"
)
PEERS_OWN = (  # the names that torch's fully_shard shares with shardwise
    "CPUOffloadPolicy DataParallelMeshDims FSDPModule fully_shard GradientReductionHandle MixedPrecisionPolicy "
    "OffloadPolicy register_fsdp_forward_method UnshardHandle share_comm_ctx"
)


@pytest.mark.parametrize(
    "names",
    [
        arguments_of(fsdp.FullyShardedDataParallel),
        arguments_of(fsdp.MixedPrecision),
        arguments_of(fsdp.CPUOffload),
        arguments_of(fsdp.FullyShardedDataParallel.summon_full_params),
        arguments_of(fsdp.FullStateDictConfig),
        public_methods(fsdp.FullyShardedDataParallel),
        set(fsdp.__all__) - set(PEERS_OWN.split()),
        members_of(fsdp.ShardingStrategy, fsdp.BackwardPrefetch, fsdp.StateDictType),
        {name for name in vars(peers_wrap) if name.endswith(("wrap_policy", "Policy", "wrap"))}
        - {name for name in vars(peers_wrap) if name.startswith("_")},
        arguments_of(DistributedDataParallel),
        {"no_sync", "join", "register_comm_hook", "join_hook", "join_device", "join_process_group"},
        OF_1_11,
        set(LIGHTNING.split()),
    ],
    ids=lambda names: f"{len(names)} such as {min(names)}",
)
def test_every_name_has_a_row(names: set[str]) -> None:
    assert sorted(names - set(table())) == []


def test_every_row_that_claims_something_names_a_test_that_exists() -> None:
    for name, here in table().items():
        if name not in SHOWN_BY:
            assert here.startswith(("none: ", "not yet")), f"{name}: what is said is not shown"
            continue
        file, _, test = SHOWN_BY[name].rpartition(".")
        text = next(TESTS.rglob(f"{file or THIS}.py")).read_text()
        assert f"\ndef {test}(" in text, f"{name}: {SHOWN_BY[name]} does not exist"


def test_what_is_shown_is_in_the_table() -> None:
    assert sorted(set(SHOWN_BY) - set(table())) == []


HOMES: list[Any] = [
    shardwise,
    FSDPModule,
    nn,
    nn.Module,
    torch,
    dist,
    DeviceMesh,
    torch.distributed.checkpoint.state_dict,
    DTensor,
    Tensor,
    {}.__class__,
    __builtins__ if inspect.ismodule(__builtins__) else type("B", (), dict(__builtins__)),
]
OF_THE_READER = {"init_fn", "wrap", "isinstance"}
OF_POLICIES = {"LowPrecisionReduction", "QuantizedReduction"}  # as the row says


def has(home: Any, name: str) -> bool:
    """Whether ``name`` stands in ``home``; or, if it begins with its package, in that."""
    package, _, last = name.rpartition(".")
    return last in importlib.import_module(package).__all__ if package else hasattr(home, name)


def test_every_function_that_the_table_calls_exists() -> None:
    called = {
        name
        for here in table().values()
        for code in re.findall(r"`([^`]+)`", here)
        for name in re.findall(r"(shardwise\.\w+\.\w+|\w+)\(", code)
    }
    assert {"shard_model", "shardwise.strategies.register_comm_hook"} <= called
    missing = {name for name in called if not any(has(home, name) for home in HOMES)}
    assert sorted(missing - OF_THE_READER - OF_POLICIES - {"model", "buffer", "bucket"}) == []


def test_every_argument_that_the_table_names_exists() -> None:
    accepted = set().union(
        *(
            arguments_of(function)
            for function in (
                *(shard_model, MixedPrecisionPolicy, CommPolicy, StateDictOptions, unsharded),
                *(shardwise.init.sync_module_states, shardwise.full_state_dict),
                shardwise.state.load_full_optimizer_state_dict,
            )
        ),
        arguments_of(DeviceMesh.from_group),
        {"options", "device"},
    )
    named = {
        name
        for here in table().values()
        for code in re.findall(r"`([^`]+)`", here)
        for name in re.findall(r"(\w+)=", code)
    }
    assert sorted(named - accepted) == []
