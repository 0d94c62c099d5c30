"""What ``shard_model`` does to modules beside sharding them: activation checkpointing and torch.compile.

Checkpointing may keep the inputs of modules in host memory between forward and backward. Torch's
``save_on_cpu`` copies on the computing stream, which waits for each copy. Here copies run on a stream of
their own, and those for backward run one call ahead:

    compute  [call 0   ][call 1   ][call 2   ] ... [2 again, backward 2][1 again, backward 1][0 again, ...
    copies   [0 out ]   [1 out ]   [2 out ]        [1 in ]              [0 in ]

All memory on the device belongs to the computing stream. It waits for the end of a copy before it uses or
frees that memory, which is at the next call. So the inputs of two calls are on the device at a time, and the
last call of forward still finds its own there.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardwise.arguments import check_type, describe
from shardwise.comm.streams import (
    CommStream,
    DeviceStream,
    Finish,
    HostStream,
    current_stream,
    has_streams,
    nothing,
)
from shardwise.groups.managed_modules import owner_of
from shardwise.layout.fqns import names_in, uncompiled
from shardwise.strategies.wrap_policies import has_forward, modules_inside, range_of_names
from shardwise.torch_compat import dynamo, pytree, tensor_impl

_COPY = "_shardwise_copy"  # an attribute of an input: its version, and a reference to its copy


# --- inputs in host memory ------------------------------------------------------------------------


class _Place:
    """Stands in arguments for an input that is moved."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Inputs:
    """The inputs of one call. ``previous`` returns those of the call before, if its graph is alive."""

    def __init__(self, tensors: Sequence[Tensor], previous: Callable[[], "_Inputs | None"]) -> None:
        self.previous = previous
        # Without the graph, which would otherwise live as long as what is on the device.
        self.on_device = {index: tensor.detach() for index, tensor in enumerate(tensors)}
        self.versions = [tensor_impl.version(tensor) for tensor in tensors]
        self.device = tensors[0].device
        self.on_host: list[Tensor] = []
        self.changed: torch.Size | None = None
        """The shape of an input that was changed while it was copied."""

    def note_changes(self) -> None:
        """Find the inputs that were changed while they were copied."""
        for index, tensor in self.on_device.items():
            if tensor_impl.version(tensor) != self.versions[index]:
                self.changed = tensor.shape

    def check_unchanged(self) -> None:
        """Raise if an input was changed while it was copied."""
        if self.changed is not None:
            raise RuntimeError(
                f"An input of a checkpointed module, of shape {tuple(self.changed)}, was changed in place by "
                "the module or while it ran. In backward, activation checkpointing runs the module again "
                "from the input as it was. Let the module compute a new tensor."
            )


class InputOffload:
    """Moves the inputs of the checkpointed modules of a model. A copy of the model has another one."""

    def __init__(self) -> None:
        # By the stream that calls run on, to which the memory of their inputs belongs.
        self._copies: dict[Any, _Copies] = {}

    def __reduce__(self) -> Any:
        return InputOffload, ()

    def checkpoint(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of ``forward``, which runs again in backward, from inputs that wait in host memory."""
        places: dict[Tensor, _Place] = {}  # one for a tensor that is given twice

        def take(leaf: Any) -> Any:
            return places.setdefault(leaf, _Place(len(places))) if _can_move(leaf) else leaf

        again = pytree.tree_map(take, (args, kwargs)) if torch.is_grad_enabled() else None
        tensors = list(places)
        if not tensors:
            return run_checkpointed(forward, *args, **kwargs)
        device = tensors[0].device
        stream = current_stream(device) if has_streams(device) else device
        copies = self._copies.setdefault(stream, _Copies())
        inputs = copies.save(tensors)
        # The caller's own containers, to which forward may add, and which it gets only once.
        first = [(args, kwargs)]
        # Checkpointing saves its own arguments, in this order. What forward saves goes to hooks of its own.
        indices = iter(range(len(tensors)))

        def pack(saved: Tensor) -> int | Tensor:
            return next(indices, saved) if saved.numel() else saved  # torch 2.11 saves an empty one before

        with saved_tensors_hooks(pack, partial(copies.load, inputs)):
            return checkpoint(_first_or_again, forward, first, again, *tensors, use_reentrant=False)


class _Copies:
    """Copies of the inputs of calls that run on one stream."""

    def __init__(self) -> None:
        self._stream: CommStream | None = None
        self._copying: list[tuple[_Inputs, Finish]] = []
        """Copies that the computation has not waited for."""
        self._last: Callable[[], _Inputs | None] = nothing

    @torch.no_grad()
    def save(self, tensors: list[Tensor]) -> _Inputs:
        """Begin to copy ``tensors`` to host memory."""
        self._end()
        inputs = _Inputs(tensors, self._last)
        self._last = weakref.ref(inputs)
        pairs = []
        for tensor, version in zip(tensors, inputs.versions, strict=True):
            known, copy = vars(tensor).get(_COPY, (None, nothing))
            on_host = copy() if known == version else None  # as of what an encoder gives to each block
            if on_host is None:
                on_host = _host_memory_for(tensor)
                pairs.append((on_host, tensor.detach()))
                vars(tensor)[_COPY] = version, tensor_impl.AttributeRef(on_host)
            inputs.on_host.append(on_host)
        self._copy(inputs, pairs)
        return inputs

    @torch.no_grad()
    def load(self, inputs: _Inputs, index: int | Tensor) -> Tensor:
        """An input on its device; with the first one of a call, begin to copy those of the call before."""
        if isinstance(index, Tensor):  # which was not moved
            return index
        if index == 0:
            self._bring(inputs)
            self._end(but=inputs)
            inputs.check_unchanged()
            if (previous := inputs.previous()) is not None:
                self._bring(previous)
        return inputs.on_device.pop(index)

    def _bring(self, inputs: _Inputs) -> None:
        if not inputs.on_device:
            empty = [torch.empty_like(each, device=inputs.device) for each in inputs.on_host]
            inputs.on_device = dict(enumerate(empty))
            self._copy(inputs, list(zip(empty, inputs.on_host, strict=True)))
            inputs.versions = [tensor_impl.version(each) for each in empty]

    def _copy(self, inputs: _Inputs, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self._stream is None:
            self._stream = DeviceStream(inputs.device) if has_streams(inputs.device) else HostStream()

        def start() -> Finish:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return nothing

        self._stream.wait_for_compute()
        self._copying.append((inputs, self._stream.submit(start).wait))

    def _end(self, but: _Inputs | None = None) -> None:
        """Have the computation wait for all copies; then leave on the device only what ``but`` has there."""
        copying, self._copying = self._copying, []
        for _, wait in copying:
            wait()
        for inputs, _ in copying:
            inputs.note_changes()
            if inputs is not but:
                inputs.on_device.clear()


def run_checkpointed(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of ``forward``, which runs again in backward from the same arguments."""
    # As positional arguments: torch looks there, also in containers, for devices whose random states to keep.
    return checkpoint(_call, forward, args, kwargs, use_reentrant=False)


def _call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _first_or_again(forward: Callable[..., Any], first: list[Any], again: Any, *tensors: Tensor) -> Any:
    if first:
        args, kwargs = first.pop()
    else:
        args, kwargs = pytree.tree_map(partial(_restored, tensors), again)
    return forward(*args, **kwargs)


def _restored(tensors: Sequence[Tensor], leaf: Any) -> Any:
    return tensors[leaf.index] if type(leaf) is _Place else leaf


def _can_move(leaf: Any) -> bool:
    """Whether ``leaf`` is an activation on a device. Parameters are in memory anyhow, as are views of them;
    tensors without gradients, such as masks, are mostly shared by all calls."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.is_leaf or not leaf.numel():
        return False
    base = tensor_impl.base_of(leaf)
    if (base is not None and base.is_leaf) or 0 in leaf.stride():  # expanded: a copy would be larger
        return False
    return not tensor_impl.has_memory(leaf) or (type(leaf) is Tensor and has_streams(leaf.device))


def _host_memory_for(tensor: Tensor) -> Tensor:
    if tensor_impl.has_memory(tensor):
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="meta")  # in dry runs, whose fake tensors count as the device's


# Torch would trace the copies into a graph.
dynamo.break_graphs(InputOffload.checkpoint)


_Classes = type[nn.Module] | Set[type[nn.Module]] | Sequence[type[nn.Module]]
ActivationCheckpointing = bool | str | _Classes | Callable[[nn.Module], Any]

_DONE = "_shardwise_block_options"  # in the dict of the model


# --- which modules --------------------------------------------------------------------------------


def modules_to_checkpoint(
    caller: str, wanted: Any, model: nn.Module, blocks: Sequence[nn.Module]
) -> list[nn.Module]:
    """The modules that ``activation_checkpointing=wanted`` means, the outermost where they lie in each other.
    Sharded ones are left as they are.

    ``blocks``: what True and "blocks" stand for.
    """
    if wanted is False:
        return []
    inside = modules_inside(model)
    is_meant = _meaning(caller, wanted, blocks)
    found = [module for module in inside if owner_of(module) is None and is_meant(module)]
    if not found:
        text = repr(wanted) if isinstance(wanted, (bool, str)) else describe(wanted)
        raise ValueError(
            f"{caller}: activation_checkpointing={text} chooses no module inside the "
            f"{type(model).__name__}. Pass the class of its blocks, a set of classes, or a function of a "
            "module."
        )
    for module in found:
        if not has_forward(module):
            raise ValueError(
                f"{caller}: activation_checkpointing chooses '{inside[module]}', a {type(module).__name__}, "
                "which has no forward to run again. Choose its children, or the module around it."
            )
    covered = {below for module in found for below in module.modules() if below is not module}
    return [module for module in found if module not in covered]


def _meaning(caller: str, wanted: Any, blocks: Sequence[nn.Module]) -> Callable[[nn.Module], Any]:
    if wanted is True or wanted == "blocks":
        return set(blocks).__contains__
    classes = tuple(wanted) if isinstance(wanted, (Set, list, tuple)) else (wanted,)
    if classes and all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        return lambda module: isinstance(uncompiled(module), classes)
    if callable(wanted) and not isinstance(wanted, (type, nn.Module)):
        return wanted  # type: ignore[no-any-return]
    raise TypeError(
        f"{caller}: activation_checkpointing is {describe(wanted)}. Pass True or 'blocks' for the modules "
        "that become groups, a module class or a set of them, a function of a module, or False."
    )


# --- what is done to them -------------------------------------------------------------------------


def checkpoint_activations(modules: Sequence[nn.Module], is_offloaded: bool) -> None:
    """Have each module keep only its inputs, in host memory if ``is_offloaded``, and run its forward again in
    backward.

    The module's forward is replaced, inside its hooks: backward unshards before it runs that again.
    """
    checkpointed = InputOffload().checkpoint if is_offloaded else run_checkpointed
    for module in modules:
        # Copies of the module deep-copy a partial, but not a closure.
        run = partial(checkpointed, module.forward)
        module.forward = update_wrapper(run, module.forward)  # type: ignore[method-assign]


def check_offloading(caller: str, is_offloaded: bool, wanted: Any, compiling: Any = None) -> None:
    """Raise unless ``activation_offloading=is_offloaded`` can be had beside the other options."""
    if is_offloaded and wanted in (None, False):
        raise ValueError(
            f"{caller}: activation_offloading moves to host memory what activation checkpointing keeps for "
            "backward, and activation_checkpointing is not set. Pass activation_checkpointing=True, or a "
            "class of modules, as well."
        )
    if is_offloaded and compiling is not None:
        raise ValueError(
            f"{caller}: activation_offloading does not work with compile: inside a graph, torch.compile "
            "decides what is kept for backward. Leave one of them out."
        )


def compile_options(caller: str, wanted: Any) -> dict[str, Any] | None:
    """The options of torch.compile that ``compile=wanted`` means; None: do not compile."""
    if wanted is False:
        return None
    kinds = "True, a dict of options of torch.compile, or False"
    check_type(caller, "compile", wanted, kinds, bool, Mapping)
    options = {} if wanted is True else dict(wanted)
    try:
        torch.compile(nn.Identity(), **options)  # which looks at names, and compiles nothing yet
    except Exception as error:
        raise ValueError(f"{caller}: torch.compile refuses compile={wanted!r}: {error}") from error
    return options


# --- what explain shows ---------------------------------------------------------------------------


def note_done(model: nn.Module, **modules: Sequence[nn.Module]) -> None:
    """Have ``explain`` know what was done to which modules."""
    model.__dict__[_DONE] = {what: list(each) for what, each in modules.items() if each}


def done_lines(model: nn.Module) -> Iterator[str]:
    """A line for each thing that was done to modules of ``model``."""
    names = names_in(model)
    for what, modules in model.__dict__.get(_DONE, {}).items():
        shown = range_of_names([names[module] or "the model" for module in modules if module in names])
        yield f"{what.replace('_', ' ')}: {shown}"
