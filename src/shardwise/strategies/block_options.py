"""What ``shard_model`` does to modules beside sharding them: activation checkpointing and torch.compile."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from shardwise.arguments import check_type, describe
from shardwise.groups.managed_modules import owner_of
from shardwise.layout.fqns import names_in, uncompiled
from shardwise.strategies.input_offload import InputOffload, run_checkpointed
from shardwise.strategies.module_trees import has_forward, modules_inside, range_of_names

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
