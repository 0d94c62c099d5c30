"""``shard_model``: one line chooses among data parallelism and the stages of ZeRO.

A strategy is a mesh and two settings of ``fully_shard`` (meshes.py); what it is applied to, wrap_policies.py
chooses. ``"auto"`` names none: auto.py chooses one.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
(https://arxiv.org/abs/1910.02054).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_flags, check_module, check_number, describe
from shardwise.engine.module_state import is_sharded, sharded_module_states
from shardwise.fsdp_module import ShardedModule
from shardwise.fully_shard import fully_shard
from shardwise.groups.managed_modules import owner_of
from shardwise.layout.fqns import clean
from shardwise.layout.mesh import default_device_type
from shardwise.layout.precision import PrecisionRule
from shardwise.policies import (
    CommPolicy,
    CPUOffloadPolicyLike,
    DataParallelMeshDimsLike,
    MixedPrecisionPolicyLike,
    OffloadPolicy,
    ShardPlacementFn,
)
from shardwise.ranks.failures import monitored
from shardwise.setup.discovery import Found, Meshes, make_param, names_below
from shardwise.setup.validation import check_ignored, check_modules, check_offload, class_name
from shardwise.strategies.auto import CHOICE, AutoOptions, Shard, choose
from shardwise.strategies.block_options import (
    ActivationCheckpointing,
    check_offloading,
    checkpoint_activations,
    compile_options,
    modules_to_checkpoint,
    note_done,
)
from shardwise.strategies.meshes import Strategy
from shardwise.strategies.overrides import GroupPlan, Overrides, offload_named, plan_groups, precision_named
from shardwise.strategies.wrap_policies import Wrap, WrapWhere, as_policy, chosen, merge_neighbours


@monitored
def shard_model(
    model: nn.Module,
    *,
    strategy: Strategy | Literal["auto"] = "zero3",
    memory: int | str | None = None,
    sample: Any = None,
    optimizer: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    wrap: Wrap | None = None,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: DataParallelMeshDimsLike | None = None,
    overrides: Overrides | None = None,
    bucket_cap_mb: float | None = None,
    mp_policy: MixedPrecisionPolicyLike | str | None = None,
    offload_policy: OffloadPolicy | CPUOffloadPolicyLike | str | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    comm_policy: CommPolicy | None = None,
    activation_checkpointing: ActivationCheckpointing = False,
    activation_offloading: bool = False,
    compile: bool | Mapping[str, Any] = False,
    sync_module_states: bool = False,
    check_equal_weights: bool = True,
) -> ShardedModule:
    """Shard a model by a named strategy: its blocks first, then the rest.

    From equal weights on all ranks (see ``sync_module_states``), every strategy gives the same training and
    the same checkpoints. They differ in what each of N ranks holds and sends. With P bytes of parameters, G
    of gradients and S of optimizer state, and one backward for each optimizer step:

    ================  =======================  ==============================================
    strategy          bytes held               bytes sent, times (N - 1) / N
    ================  =======================  ==============================================
    ``ddp``           P + G + S                2 G: all-reduce
    ``zero1``         P + (P + G + S) / N      P + G: all-gather once a step, reduce-scatter
    ``zero2``         P + (P + G + S) / N      P + G a backward; P only from forward to backward
    ``zero3``         (P + G + S) / N          2 P + G a backward: unsharded for forward and backward
    ``zero3_hpz``     as ``zero3``; from forward to backward, a host of n ranks keeps P together, each P / n,
                      and backward all-gathers within hosts
    ``hybrid``        as ``zero3`` with the ranks of a host for N; and an all-reduce of G / N among hosts
    ``hybrid_zero2``  as ``zero2``, likewise
    ================  =======================  ==============================================

    ``zero1`` and ``zero2`` keep their shards as well as the full parameters. Inside :func:`no_sync`,
    gradients are full under every strategy, and reduced once a step. ``zero1`` suits that best, since its
    microbatches share one all-gather as well.

    ``auto`` chooses the candidate that fits in ``memory`` and exposes the fewest bytes. Candidates are
    ``ddp``, ``zero2``, ``zero3`` with as many of the last blocks kept unsharded from forward to backward as
    fit, and ``zero3_hpz`` and the hybrid strategies if the ranks have a mesh for them. Exposed bytes are
    those that a rank sends in a step of one backward or, with these, those that its host sends to others.
    Between equal candidates, it chooses the one that sends less within hosts, then the one that holds less.
    Like :func:`shardwise.estimate`, it runs steps on fake tensors, a few seconds for each candidate, on all
    ranks. A tenth of ``memory`` stays free for what these steps do not count. :func:`explain` shows the
    choice and the candidates; the logger "shardwise.strategies.auto" reports it at level INFO.

    Args:
        model: not sharded itself. Modules inside it that are already sharded stay as they are.
        strategy: one of the above, or ``"auto"``.
        memory: required by ``"auto"``: the memory of a rank, in bytes, as ``"80GB"`` or as ``"h100"``.
        sample: required by ``"auto"``: the inputs of forward on a rank, as ``batch`` of
            :func:`shardwise.estimate`. Only shapes and dtypes are read, which must be the same on all ranks;
            pass the largest inputs.
        optimizer: for ``"auto"``: a name or a function, as in :func:`shardwise.estimate`. None: AdamW.
        loss: for ``"auto"``: a function that makes a scalar of the output of forward. None: the output's
            ``loss``, or a sum.
        wrap: which modules become groups, to be unsharded for their own forward and backward. A module class
            or a set of them, a predicate ``(module)`` or ``(name, module)``, FSDP1's recursive
            ``(module, recurse, nonwrapped_numel)``, or a policy object
            (:class:`shardwise.strategies.WrapClasses`, :class:`shardwise.strategies.WrapBySize`, or any with
            its method ``choose``). None: the repeated blocks; see :class:`shardwise.strategies.WrapRepeated`.
            :func:`explain` shows the result.
        mesh: of one dimension, or of two, (replicate, shard), for ``zero3_hpz`` and the hybrid strategies.
            None: all ranks, on the device that :func:`fully_shard` chooses. For these strategies, they are
            arranged by ``LOCAL_WORLD_SIZE``, which torchrun sets. On one host, they are the same as ``zero3``
            or ``zero2``; with one rank on each host, the hybrid ones are the same as ``ddp``.
        dp_mesh_dims: names of the dimensions to use, if the mesh has more.
        overrides: for single groups, by module name, pattern of names (``"blocks.*"``) or module class,
            another strategy, or a dict of these arguments: strategy, mesh, dp_mesh_dims, mp_policy,
            offload_policy, comm_policy, reshard_after_forward, shard_placement_fn. The root's name is "". If
            several entries match, the last one counts.
        bucket_cap_mb: neighbouring modules share a group as long as its full parameters need at most this
            many megabytes (10^6 bytes). None: each has its own group.
        mp_policy: as in :func:`fully_shard`; or ``"bf16"`` or ``"fp16"``, which compute in that dtype and
            reduce in float32.
        offload_policy: where shards live; ``"cpu"`` stands for :class:`CPUOffloadPolicy`.
        ignored_params: parameters to leave as they are.
        ignored_modules: modules whose parameters, and those of modules inside them, stay as they are.
        shard_placement_fn: the dim to shard each parameter on.
        comm_policy: how and when parameters are communicated.
        activation_checkpointing: which modules keep only their inputs between forward and backward, and run
            their forward again in backward: True or ``"blocks"`` for the modules that become groups, a module
            class or a set of them, or a predicate ``(module)``. If such modules are nested, only the
            outermost. Each gets its own ``forward``, around :func:`torch.utils.checkpoint.checkpoint` without
            reentry; names and classes stay.
        activation_offloading: between forward and backward, keep those inputs in host memory; needs
            ``activation_checkpointing``. Only activations move: plain tensors on a device that need a
            gradient and are no parameters. Two copies over the bus for each, beside the computation. A
            module that changes its input in place raises a RuntimeError. Not with ``compile``.
        compile: compile each module that becomes a group, or the model if it is the only group, by
            ``module.compile()``; a dict holds options of :func:`torch.compile`.
        sync_module_states: give all ranks the values of the first rank of the mesh; collective.
        check_equal_weights: in the first forward with gradients, compare the weights that ranks have
            sharded; see :func:`fully_shard`.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: an unknown strategy or name of a policy; a mesh that does not fit the strategy; nothing
            that fits in ``memory``; a ``wrap`` or an override that matches nothing; and as
            :func:`fully_shard` raises.
        TypeError: an argument is of the wrong kind.
        NotImplementedError: ``"auto"`` and a parameter that is a DTensor or of another class than plain
            tensors.

    Warns:
        UserWarning: the root's own group has more than half of the parameters, which are unsharded at once.

    Example::

        model = shard_model(model, strategy="zero2", wrap={TransformerBlock})
        optimizer = torch.optim.AdamW(model.parameters())
    """
    check_module("shard_model", model)
    check_modules(model)
    check_flags(
        "shard_model",
        activation_offloading=activation_offloading,
        sync_module_states=sync_module_states,
        check_equal_weights=check_equal_weights,
    )
    compiling = compile_options("shard_model", compile)
    check_offloading("shard_model", activation_offloading, activation_checkpointing, compiling)
    mp_policy = precision_named("shard_model", mp_policy)
    offload_policy = offload_named("shard_model", offload_policy)
    left_alone = _check_ignored_modules(ignored_modules)
    check_ignored(ignored_params)
    inside = {p for m in left_alone for p in m.parameters(recurse=False) if not isinstance(p, DTensor)}
    ignored = {*(ignored_params or ()), *inside}
    taken = {p for m in model.modules() if owner_of(m) is not None for p in m.parameters(recurse=False)}
    ids = {id(param) for param in ignored | taken}
    blocks = _blocks_of(model, wrap, ids, left_alone)
    checkpointed = modules_to_checkpoint("shard_model", activation_checkpointing, model, blocks)
    auto = AutoOptions(memory, sample, optimizer, loss)
    choice = None
    changes: Overrides | None = overrides
    if strategy == "auto":
        _refuse_beside_auto(overrides=overrides, shard_placement_fn=shard_placement_fn)
        same = {"bucket_cap_mb": bucket_cap_mb, "mp_policy": mp_policy, "comm_policy": comm_policy}
        on_device = (mesh.device_type if mesh else default_device_type("shard_model")) != "cpu"
        offloads = activation_offloading and on_device
        shard = shard_copies(model, blocks, checkpointed, offloads, same, ignored)
        dtype = getattr(mp_policy, "param_dtype", None)
        choice = choose(model, auto, mesh, dp_mesh_dims, dtype, check_offload(offload_policy), shard)
        strategy, changes = cast(Strategy, choice.trial.strategy), choice.overrides
    else:
        auto.refuse_any(strategy)
    options: dict[str, Any] = {
        "strategy": strategy,
        "mesh": mesh,
        "dp_mesh_dims": dp_mesh_dims,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "shard_placement_fn": shard_placement_fn,
        "comm_policy": comm_policy,
    }
    plans = plan_groups(options, changes, model, blocks)
    own = _own_modules(model, blocks)
    _rehearse(model, own, plans, ids)
    _warn_of_large_root(model, own, {id(param) for param in ignored})
    groups = [[block] for block in blocks]
    if bucket_cap_mb is not None:
        wanted = "a number of megabytes above 0, or None for a group of each module"
        check_number("shard_model", "bucket_cap_mb", bucket_cap_mb, wanted, above=0, kinds=(int, float))
        groups = merge_neighbours(model, blocks, ids, int(bucket_cap_mb * 1e6), plans.__getitem__)
    for modules in [*groups, [model]]:
        together: Any = modules if len(modules) > 1 else modules[0]
        fully_shard(
            together,
            ignored_params=ignored,
            sync_module_states=sync_module_states,
            check_equal_weights=check_equal_weights,
            **plans[modules[0]].arguments,
        )
        if not plans[modules[0]].strategy.reshard_after_backward:
            sharded_module_states(modules[0])[0].group.configure(reshard_after_backward=False)
    checkpoint_activations(checkpointed, activation_offloading)
    compiled = [] if compiling is None else blocks or [model]
    for module in compiled:
        module.compile(**(compiling or {}))
    note_done(
        model,
        activation_checkpointing=checkpointed,
        activation_offloading=checkpointed if activation_offloading else [],
        compiled=compiled,
    )
    if choice is not None:
        model.__dict__[CHOICE] = choice
    return cast(ShardedModule, model)


def _refuse_beside_auto(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f'shard_model: {name} does not work with strategy="auto", which chooses for all groups, '
                "with shards on dim 0. Leave it out, or name a strategy."
            )


def shard_copies(
    model: nn.Module,
    blocks: list[nn.Module],
    checkpointed: list[nn.Module],
    is_offloaded: bool,
    options: dict[str, Any],
    ignored: Set[nn.Parameter] = frozenset(),
) -> Shard:
    """A function that shards copies of ``model`` as it would be, for dry runs."""

    def shard(copy: nn.Module, mesh: DeviceMesh, strategy: str, overrides: Overrides) -> None:
        params = zip(model.parameters(), copy.parameters(), strict=True)
        copies = dict(zip(model.modules(), copy.modules(), strict=True))
        wanted = {copies[block] for block in blocks}
        again = {copies[module] for module in checkpointed}
        shard_model(
            copy,
            strategy=cast(Strategy, strategy),
            wrap=WrapWhere(lambda module: module in wanted) if wanted else None,
            mesh=mesh,
            overrides=overrides,
            ignored_params={own for param, own in params if param in ignored},
            activation_checkpointing=again.__contains__ if again else False,
            activation_offloading=is_offloaded and bool(again),
            check_equal_weights=False,
            **options,
        )

    return shard


def _check_ignored_modules(modules: Iterable[nn.Module] | None) -> set[nn.Module]:
    """``modules`` and all inside them."""
    if isinstance(modules, nn.Module) or (modules is not None and not isinstance(modules, Iterable)):
        raise TypeError(
            f"shard_model: ignored_modules is {describe(modules)}; pass a list or set of modules."
        )
    modules = list(modules or ())
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"shard_model: ignored_modules contains {describe(module)}; pass nn.Modules.")
        if is_sharded(module):
            raise ValueError(
                f"shard_model: ignored_modules contains a {class_name(module)} that is sharded already, by "
                "its own fully_shard; such modules are left as they are without being named."
            )
    return {inner for module in modules for inner in module.modules()}


def _blocks_of(model: nn.Module, wrap: Any, ignored: set[int], left_alone: set[nn.Module]) -> list[nn.Module]:
    """What ``wrap`` chooses, except for what is sharded or to be left alone."""
    blocks = [
        module
        for module in chosen(as_policy(wrap), model, ignored)
        if module not in left_alone and owner_of(module) is None
    ]
    for block in blocks:
        check_modules(block)
    return blocks


# --- before anything is touched -------------------------------------------------------------------


def _own_modules(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """For each block and the model: the modules whose parameters will be in its group."""
    taken: set[nn.Module] = set()
    own = {}
    for block in (*blocks, model):
        own[block] = [m for m in block.modules() if m not in taken and owner_of(m) is None]
        taken.update(own[block])
    return own


def _rehearse(
    model: nn.Module,
    own: dict[nn.Module, list[nn.Module]],
    plans: dict[nn.Module, GroupPlan],
    ignored: set[int],
) -> None:
    """Raise what ``fully_shard`` would raise for the parameters of any group, before the first is sharded."""
    names = names_below([model])
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module, modules in own.items():
        arguments, meshes = plans[module].arguments, Meshes(plans[module].mesh)
        rule = PrecisionRule(arguments["mp_policy"], [module], modules)
        for param, sites in Found([model], modules, names, ignored).params.items():
            make_param(meshes, arguments["shard_placement_fn"], rule, [model], param, sites)
            places.setdefault(param, []).extend((module, site.fqn) for site in sites)
    for found_at in places.values():
        if len({module for module, _ in found_at}) > 1:
            _check_tie(found_at, names, own, plans)


def _check_tie(
    found_at: list[tuple[nn.Module, str]],
    names: dict[nn.Module, str],
    own: dict[nn.Module, list[nn.Module]],
    plans: dict[nn.Module, GroupPlan],
) -> None:
    """A tied parameter moves to the lowest group around its places, if all of them share a mesh."""
    around = [m for m in own if all(f"{fqn}.".startswith(f"{names[m]}.".lstrip(".")) for _, fqn in found_at)]
    lowest = max(around, key=lambda module: len(names[module]))
    meshes = {}
    for module in (lowest, *(module for module, _ in found_at)):
        arguments = plans[module].arguments
        meshes[id(arguments["mesh"]), id(arguments.get("dp_mesh_dims"))] = names[module] or "the model"
    if len(meshes) > 1:
        raise ValueError(
            f"shard_model: {' and '.join(fqn for _, fqn in found_at)} are tied, but their groups, and the "
            f"one around both, are sharded over different meshes ({', '.join(meshes.values())}). Give them "
            "one strategy, or untie them."
        )


def _warn_of_large_root(model: nn.Module, own: dict[nn.Module, list[nn.Module]], ignored: set[int]) -> None:
    """Warn if most of the model is in the root's group, with parameters that tie groups together."""
    shares = {
        owner: {param for module in modules for param in module.parameters(recurse=False)}
        for owner, modules in own.items()
    }
    num_groups = Counter(param for share in shares.values() for param in share if id(param) not in ignored)
    kept = {param: param.numel() for param, n in num_groups.items() if n > 1 or param in shares[model]}
    numel = sum(kept.values())
    total = sum(param.numel() for param in model.parameters() if id(param) not in ignored)
    if 2 * numel <= total:
        return
    names = {param: clean(name) for name, param in model.named_parameters()}
    largest = sorted(kept, key=lambda param: -kept[param])[:3]
    warnings.warn(
        f"shard_model: the root's own group keeps {numel:,} of {total:,} parameters, {numel / total:.0%}. "
        "They are communicated in one piece, with little to overlap it, and are all in memory through "
        f"forward and backward. The largest are {', '.join(names[param] for param in largest)}. Choose the "
        "modules they are in with wrap=.",
        stacklevel=4,  # over the frame of the decorator
    )
