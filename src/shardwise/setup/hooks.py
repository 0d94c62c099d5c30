"""The hooks by which calls of modules drive their groups, and methods other than forward that do the same.

Calls that reach parameters outside the forward that unshards them are told by name. The modules inside a
sharded one see full parameters only while its forward runs. A call of such a module from elsewhere
(``model.block.linear(x)``, ``model.forward(x)``, a ``generate`` of its own) meets shards, and DTensor says
only that plain tensors and DTensors were mixed. So the module's own call adds which parameter that was, and
what to call instead. It costs one Python frame a call, and nothing under ``torch.compile``, which passes it
by.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.arguments import check_type
from shardwise.engine.forward import after_forward, before_forward
from shardwise.engine.module_state import ModuleState, module_state_of, module_states_of, under_compile
from shardwise.fsdp_module import FSDPModule
from shardwise.groups.group import ParameterGroup
from shardwise.groups.states import SUMMONED
from shardwise.layout.fqns import joined
from shardwise.params.initial_values import record_full_load
from shardwise.params.parameter import Param, name_of_replaced
from shardwise.torch_compat import dynamo, nn_modules
from shardwise.torch_compat.dtensor import local_tensor, plain
from shardwise.torch_compat.tensor_impl import version

_MIXED = "mixed torch.Tensor and DTensor"


# --- calls from elsewhere -------------------------------------------------------------------------


def explain_calls(group: ParameterGroup) -> None:
    """Let the modules that hold the parameters of ``group`` explain what a call outside of it lacks."""
    for function in (_CallExplainer.__call__, _CallExplainer._call_with_replaced):
        dynamo.skip_frame(function)
    places: dict[nn.Module, list[tuple[str, Param]]] = {}
    for param in group.shards.params:
        for site in param.sites:
            places.setdefault(site.module, []).append((site.name, param))
    for module in group.managed_modules:
        if module not in group.modules and any(p is not None for p in nn_modules.parameters(module).values()):
            nn_modules.call_through(module, _CallExplainer(module, group, places))


class _CallExplainer:
    """Calls the module; if that fails because parameters are sharded, the error explains it.

    Before the call it adopts freezing, and refuses frozen weights that changed since the group was unsharded:
    both reach the shards, while full parameters are in use. It looks at one parameter only, since modules are
    frozen and averaged as a whole. It checks all of them, however, for tensors that
    ``torch.func.functional_call`` has put in place of shards, and lets the modules see those.

    ``places``: where modules hold the parameters of ``group``.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ParameterGroup,
        places: Mapping[nn.Module, Sequence[tuple[str, Param]]],
    ) -> None:
        self._module = module
        self._group = group
        self._places = [
            (each.__dict__, nn_modules.parameters(each), name, param)
            for each in module.modules()
            for name, param in places.get(each, ())
        ]
        own = places.get(module, ())
        self._one = own[0][0] if own else ""  # its parameters may belong to another group, or to none
        self._first: Any = own[0][1] if own else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shown, one = self._module.__dict__, self._one
        if one in shown:
            full, sharded = shown[one], self._first.sharded
            if full.requires_grad is not sharded.requires_grad:
                self._group.adopt_freezing()
            elif not full.requires_grad and version(full) != version(sharded) + version(plain(sharded)):
                self._group.unsharded.follow_frozen(full)
            for _, registered, name, param in self._places:
                if name not in registered or registered[name] is not param.sharded:
                    return self._call_with_replaced(args, kwargs)
        try:
            return self._module._call_impl(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            _raise_explained(self._module, self._group, error)

    def _call_with_replaced(self, args: Any, kwargs: Any) -> Any:
        hidden: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for shown, registered, name, param in self._places:
                given = registered.get(name)
                if name in shown and given is not param.sharded:
                    hidden.append((shown, name, full := shown.pop(name)))
                    if isinstance(given, DTensor) and not _are_on_one_mesh(given, full):
                        shown[name] = self._unsharded_like(given, param, full)
            return self._module._call_impl(*args, **kwargs)
        finally:
            for shown, name, full in hidden:
                shown[name] = full

    def _unsharded_like(self, given: DTensor, param: Param, full: Tensor) -> Tensor:
        """``full``, if ``given`` is the shard, detached."""
        if given.requires_grad or local_tensor(given).data_ptr() != local_tensor(param.sharded).data_ptr():
            raise RuntimeError(
                f"{param.fqn}: functional_call inside the forward of '{self._group.name}' was given a "
                "DTensor, but modules compute with full parameters. parameters() gives shards, also there: "
                "take the weights that you pass from the modules that own them (self.layer.weight)."
            )
        return full.detach()


def _are_on_one_mesh(given: DTensor, full: Tensor) -> bool:
    """True for tensors made from full parameters of tensor parallelism."""
    return isinstance(full, DTensor) and given.device_mesh == full.device_mesh


def _raise_explained(module: nn.Module, group: ParameterGroup, error: RuntimeError) -> NoReturn:
    names = [
        name
        for p in nn_modules.parameters(module).values()
        if p is not None and (name := name_of_replaced(p))
    ]
    holders = {site.module for param in group.shards.params for site in param.sites}
    is_shown = group.unsharded.is_shown and module in holders
    if not names or is_shown:
        raise error
    owner = f"'{group.name}'"
    if module not in holders:
        owner = f"the module around {owner} that owns them, as they are tied to others"
    raise RuntimeError(
        f"{', '.join(names)}: {type(module).__name__} was called while its parameters are sharded. They are "
        f"unsharded for the forward of {owner} only, when that is called as a module: module(...), not "
        ".forward(...), nor the modules inside it one by one. Call it so; or name the method that does this "
        "with register_fsdp_forward_method(module, method_name); or call unshard() on it before, and "
        "reshard() after."
    ) from None


# --- the hooks ------------------------------------------------------------------------------------


def install_hooks(module_state: ModuleState) -> None:
    """Drive the group of ``module_state`` by the forwards of its modules.

    Our hook before forward is the first, and the one after it the last, also among those registered later:
    the caller's own hooks see full parameters, and the outputs that they return announce backward. The one
    after it runs after an exception as well.
    """
    for module in module_state.group.modules:
        after = module.register_forward_hook(
            partial(after_forward, module_state), with_kwargs=True, always_call=True
        )
        before = partial(before_forward, module_state, after.id)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_load_state_dict_pre_hook(partial(_before_load, module_state))
        module.register_load_state_dict_post_hook(partial(_after_load, module_state))


def _before_load(
    module_state: ModuleState, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Full tensors in a state dict become shards: each rank takes its part."""
    if module_state.group.unsharded.state is SUMMONED:
        return  # full parameters are what is loaded into
    names = {inner: name for name, inner in module.named_modules(prefix=prefix.rstrip("."))}
    for param in module_state.group.shards.params:
        for site in param.sites:
            key = joined(names.get(site.module, ""), site.name)
            if site.module in names and key in state:
                is_full = param.is_full_value(state[key])
                record_full_load(param, state[key] if is_full else None)
                if is_full:
                    state[key] = param.as_shard(state[key])
                    module_state.group.plan_changed()


def _after_load(module_state: ModuleState, module: nn.Module, incompatible_keys: Any) -> None:
    """Shards that ``load_state_dict(assign=True)`` put in place move into the buffer at once."""
    module_state.group.adopt_when_moved()
    if not incompatible_keys.missing_keys:
        module_state.group.partly_loaded = None


_WRAPPED = "_shardwise_methods"


def wrap_method(module: nn.Module, name: str, module_state: ModuleState) -> None:
    """Let ``module.<name>(...)`` unshard and free as ``module(...)`` does."""
    method = getattr(module, name)

    @wraps(method)
    def unsharding_call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before_forward(module_state, None, module, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception:
            after_forward(module_state, module, args, kwargs, None)
            raise
        changed = after_forward(module_state, module, args, kwargs, output)
        return output if changed is None else changed

    # Compiled by itself, it would have one hook inside of a graph and one outside.
    dynamo.skip_frame(unsharding_call)
    # Not by setattr, which a wrapper of torch.compile passes on to the module inside it.
    module.__dict__[name] = unsharding_call
    module.__dict__.setdefault(_WRAPPED, set()).add(name)


def wrapped_methods(module: nn.Module) -> set[str]:
    """Names of the methods of ``module`` that were wrapped so."""
    return module.__dict__.get(_WRAPPED, set())


def share_comm_ctx(modules: "Sequence[FSDPModule]") -> None:
    """Let several root modules share their communication streams, as pipeline stages on one rank should.

    Saves the memory that the caching allocator would reserve for each stream. Changes nothing on a CPU mesh,
    which has no streams. Needs no communication.

    Args:
        modules: a list or tuple of sharded root modules; an empty one does nothing.

    Raises:
        TypeError: ``modules`` is not a list or tuple.
        ValueError: a module in it is not sharded.

    Example::

        share_comm_ctx([first_stage, last_stage])
    """
    if found := module_states_of("share_comm_ctx", modules):
        first, *others = [module_state.root.lazy_init for module_state in found]
        first.share_streams(others)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.<method_name>(...)`` unshard parameters as ``module(...)`` does.

    Use it for modules that you run through methods other than forward, such as ``generate`` or ``encode``.
    Each call costs the all-gathers of a forward; its backward reduces gradients as usual.

    Args:
        module: any module. One that is not sharded stays as it is, so that callers need not check.
        method_name: the name of one of its methods. The method must have finished when it returns.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``, or ``method_name`` is not a string.
        ValueError: the module has no method of this name.
        NotImplementedError: the method is a generator or a coroutine: it returns before it has run, and its
            parameters would be resharded too early.

    Example::

        register_fsdp_forward_method(model, "encode")
        features = model.encode(images)
    """
    caller = "register_fsdp_forward_method"
    check_type(caller, "module", module, "an nn.Module", nn.Module)
    check_type(caller, "method_name", method_name, "the method's name", str)
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{caller}: {type(module).__name__} has no method '{method_name}'.")
    method = inspect.unwrap(getattr(module, method_name))
    if (
        inspect.isgeneratorfunction(method)
        or inspect.iscoroutinefunction(method)
        or inspect.isasyncgenfunction(method)
    ):
        raise NotImplementedError(
            f"{caller}: {type(module).__name__}.{method_name} is a generator or a "
            "coroutine: it returns before it has run, so its parameters would be freed too early. Register "
            "the methods it calls for each piece, or collect the pieces in a method that returns them."
        )
    module = under_compile(module)
    if isinstance(module, FSDPModule):
        wrap_method(module, method_name, module_state_of(module))
