"""Random settings of fully_shard: whatever a draw combines, training is that of plain PyTorch.

A draw is a dict of plain values: where ranks stand, the model, how it is wrapped, and a script of steps.

    SETTINGS_DRAW="{...}" pytest -m slow -s tests/campaign/test_settings_campaign.py
    SETTINGS_SEED=5000 SETTINGS_DRAWS=400 pytest -m slow -s tests/campaign/test_settings_campaign.py
"""

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from meshed import Layout, device_mesh
from reference import full
from scenario import Side, one_thread
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from campaign.blocks import EXACT, HAVE_LIN, KINDS, PRECISIONS, SIZES, Failure, Net, chosen_placement, names
from campaign.campaign import Campaign, Worlds
from campaign.draws import Draw, choice, many, rarely, record
from campaign.notes import Notes, difference
from campaign.training import Run, emptying_buffers, fail
from shardwise import (
    CommPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

# --- where ----------------------------------------------------------------------------------------

DP, ONE, AB, ABC = ("replicate", "shard"), ("shard",), ("a", "b"), ("a", "b", "c")
TP, CUBE = ("dp", "tp"), ("replicate", "shard", "tp")


def dims(shard: Any = None, replicate: Any = None) -> DataParallelMeshDims:
    return DataParallelMeshDims(shard=shard, replicate=replicate)


# name: (layout, dp_mesh_dims, number of ranks to shard over)
PLACES: dict[str, tuple[Layout, DataParallelMeshDims | None, int]] = {
    **{str(n): (Layout((n,), ONE, ONE), None, n) for n in (2, 1, 3, 4)},
    **{
        f"{r}x{s}": (Layout((r, s)), None, s)
        for r, s in [(1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (4, 1), (1, 4)]
    },
    **{f"replicas_{n}": (Layout((n,), ("r",), ("r",)), dims(replicate="r"), 1) for n in (2, 3, 4)},
    "replicas_2x2": (Layout((2, 2), AB, AB), dims(replicate=AB), 1),
    "flat_2x2": (Layout((2, 2), AB, AB), dims(shard=AB), 4),
    "swapped_2x2": (Layout((2, 2), AB, AB), dims(shard="a", replicate="b"), 2),
    "cube_shards": (Layout((2, 1, 2), ABC, ABC), dims(shard=("b", "c"), replicate="a"), 2),
    "cube_replicas": (Layout((1, 2, 2), ABC, ABC), dims(shard="c", replicate=AB), 2),
    "tp_1x2": (Layout((1, 2), TP, ("dp",)), None, 1),
    "tp_2x1": (Layout((2, 1), TP, ("dp",)), None, 2),
    "tp_2x2": (Layout((2, 2), TP, ("dp",)), None, 2),
    "tp_4x1": (Layout((4, 1), TP, ("dp",)), None, 4),
    "tp_swapped": (Layout((2, 2), ("tp", "dp"), ("dp",)), None, 2),
    "tp_replicas": (Layout((2, 2), TP, ("dp",)), dims(replicate="dp"), 1),
    "tp_1x2x2": (Layout((1, 2, 2), CUBE, DP), None, 2),
    "tp_2x1x2": (Layout((2, 1, 2), CUBE, DP), None, 1),
    "tp_2x2x1": (Layout((2, 2, 1), CUBE, DP), None, 2),
}
PLAIN_MESHES = [name for name, (layout, named, _) in PLACES.items() if named is None and "tp" not in name]

# --- models ---------------------------------------------------------------------------------------


NESTABLE = ("plain", "unused", "lora", "twice", "conv", "lookup")  # call all their children


class Model(Net):
    """A block may be left out: by some ranks, or plainly for the rows of these."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.left_out = len(self.blocks) - 1 if draw["skip"] else None
        self.seat: tuple[int, int] | None = None  # None: rows of all ranks are here
        self.num_seats = 1

    def run_block(self, index: int, x: Tensor) -> Tensor:
        if index != self.left_out or (self.seat is not None and self.seat[0] % 2 == 0):
            return super().run_block(index, x)
        if self.seat is not None:
            return x
        rows = torch.arange(len(x)) // (len(x) // self.num_seats) % 2 == 1
        return torch.where(rows[:, None], x, super().run_block(index, x))


def split(model: Model, draw: Draw, mesh: DeviceMesh) -> None:
    for kind, block in zip(draw["blocks"], model.blocks, strict=True):
        if kind in ("plain", "frozen"):
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            parallelize_module(block, mesh, plan)


# --- sharding -------------------------------------------------------------------------------------


def other_mesh(layout: Layout) -> DeviceMesh:
    if len(layout.shape) == 2:
        return device_mesh((layout.size,), ONE)
    return device_mesh((2, 2) if layout.size == 4 else (layout.size, 1), DP)


def reshard_choice(draw: Draw, index: int) -> bool | int | None:
    asked = (None, True, False)[index % 3] if draw["reshard"] == "mixed" else draw["reshard"]
    shards = PLACES[draw["place"]][2]
    return None if asked == 2 and asked is not True and shards % 2 else asked


def shard(model: Model, draw: Draw) -> None:
    layout, named, _ = PLACES[draw["place"]]
    if draw["place"].startswith("tp"):
        split(model, draw, layout.mesh()["tp"])
    mesh = layout.data_mesh()
    fn = None
    if draw["placement"] is not None:
        other = other_mesh(layout) if draw["placement"] == "meshes" else None
        fn = partial(chosen_placement, draw["salt"], other)
    options = {
        "mesh": mesh,
        "dp_mesh_dims": named,
        "shard_placement_fn": fn,
        "mp_policy": MixedPrecisionPolicy(**PRECISIONS[draw["precision"]][0]),
        "offload_policy": OffloadPolicy() if draw["offload"] is None else CPUOffloadPolicy(draw["offload"]),
        "comm_policy": CommPolicy(
            packing_limit_bytes=draw["packing"], prefetch=draw["prefetch"], part_bytes=draw["parts"]
        ),
    }
    for index, group in enumerate(groups_of(model, draw)):
        fully_shard(group, **options, reshard_after_forward=reshard_choice(draw, index))
    if draw["ignored"]:
        options["ignored_params"] = {model.outlet.bias}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ignored_params")
        fully_shard(model, **options, reshard_after_forward=reshard_choice(draw, len(model.blocks)))
    apply_settings(model, draw)


def groups_of(model: Model, draw: Draw) -> list[Any]:
    blocks = list(model.blocks)
    if draw["wrap"] == "blocks":
        return blocks
    if draw["wrap"] == "pair":
        return [blocks[:2], *blocks[2:]]
    if draw["wrap"] == "one_list":
        return [blocks]
    if draw["wrap"] == "some":
        return blocks[1::2]
    if draw["wrap"] == "nested":
        inner = [
            list(b.children()) if k in NESTABLE else [] for k, b in zip(draw["blocks"], blocks, strict=True)
        ]
        return [m for children, block in zip(inner, blocks, strict=True) for m in [*children, block]]
    return []


def apply_settings(model: Model, draw: Draw) -> None:
    if draw["zeros"]:
        model.set_reduce_scatter_unused_params(True)
    if draw["skip"]:
        model.blocks[model.left_out].set_may_be_unused(True)
    if draw["ignored"]:
        model.set_reduce_ignored_params(True)


# --- draws ----------------------------------------------------------------------------------------

ACTIONS = (
    None,
    None,
    *names(
        "eval inference eval_block eval_grad full_state sharded_state assign_state dcp_full dcp_sharded",
        "deepcopy optimizer_state freeze unfreeze edit edit_data unshard unshard_async unshard_edit",
        "fail_forward fail_block fail_inside fail_backward waste waste_reset resharding",
    ),
)
BETWEEN = (None,) * 8 + names(
    "eval inference eval_block full_state sharded_state dcp_full freeze unfreeze edit edit_data",
    "fail_block unshard_async unshard_edit resharding",
)
MICRO_KINDS = names(
    "plain plain plain both in_order crossed retain input_grad eval_between autograd_grad fails_first"
)
MICRO = record(
    {
        "kind": choice(*MICRO_KINDS),
        "between": choice(*BETWEEN),
        "sync": choice(True, False),
        "all_reduce": choice(True, False),
        "reshard": choice(True, True, False),
    }
)
STEP = record(
    {
        "micro": many(MICRO, least=1, most=3),
        "before": choice(*ACTIONS),
        "target": choice(0, 1, 2, 3),
        "zero": choice("none", "zeros", "model", "model_zeros", "keep"),
        "clip": choice(None, None, 0.05),
    }
)
DRAWS = record(
    {
        "steps": many(STEP, least=1, most=4),
        "blocks": many(choice(*KINDS), least=1, most=4),
        "place": choice(*PLACES),
        "sizes": choice(*SIZES),
        "order": choice("once", "once", "again", "twice", "doubled", "reversed"),
        "checkpoint": choice(None, None, "reentrant", "non_reentrant"),
        "tie": choice(None, None, None, "ends", "root_block", "blocks"),
        "wrap": choice("none", "blocks", "blocks", "blocks", "pair", "one_list", "some", "nested"),
        "reshard": choice(None, True, False, 2, 1, "mixed"),
        "placement": choice(None, None, "dims", "meshes"),
        "precision": choice(None, None, None, None, None, *list(PRECISIONS)[1:]),
        "offload": choice(None, None, False, True),
        "packing": choice(None, 0, 100, 1 << 30),
        "parts": choice(None, 0, 100),
        "prefetch": choice(1, 0, 2, 3),
        "skip": rarely(16),
        "zeros": rarely(7),
        "ignored": rarely(10),
        "empties_buffers": choice(True, False),
        "optimizer": choice("sgd", "momentum", "adamw", "adamw_foreach", "adamw_loop"),
        "salt": choice(*range(8)),
    }
)


def settled(draw: Draw) -> Draw:
    """The nearest draw that plain PyTorch can run and that the documentation allows."""
    draw = copy.deepcopy(draw)
    precise = PRECISIONS[draw["precision"]][1] == EXACT
    if draw["place"].startswith("tp"):
        if not precise:
            draw["precision"] = None
        draw["placement"] = None if draw["placement"] == "meshes" else draw["placement"]
    if draw["place"] not in PLAIN_MESHES and draw["placement"] == "meshes":
        draw["placement"] = "dims"
    if draw["skip"]:
        # The block that some ranks leave out is a group of its own, and run at most once a forward.
        draw |= {"wrap": "blocks", "tie": None, "order": "once"}
        draw["blocks"] *= 2 if len(draw["blocks"]) == 1 else 1
    with_lin = [kind for kind in draw["blocks"] if kind in HAVE_LIN]
    if len(with_lin) < {"root_block": 1, "blocks": 2}.get(draw["tie"], 0):
        draw["tie"] = None
    if draw["tie"] in ("root_block", "blocks") and draw["placement"] == "meshes":
        draw["placement"] = "dims"  # ties move between groups of one mesh only
    if draw["wrap"] == "nested" and draw["placement"] == "meshes":
        draw["placement"] = "dims"
    if draw["ignored"]:
        draw["precision"] = None
    if PRECISIONS[draw["precision"]][1] != EXACT:
        draw["optimizer"] = "sgd"  # Adam makes much of small differences
        # Comparisons and integer sums flip; recurrent kernels miss some dtypes.
        draw["blocks"] = ["plain" if k in ("lookup", "gru") else k for k in draw["blocks"]]
    for step in draw["steps"]:
        step["micro"][-1] |= {"sync": True, "all_reduce": True}
        step["target"] %= len(draw["blocks"])
        if draw["skip"]:
            step["target"] %= len(draw["blocks"]) - 1
        for where, what in [(step, "before"), *((micro, "between") for micro in step["micro"])]:
            if where[what] == "eval_block" and draw["tie"] in ("root_block", "blocks"):
                where[what] = "eval"  # the block's weight belongs to the root
            if where[what] == "dcp_full" and draw["ignored"]:
                where[what] = "full_state"
        for earlier, micro in pairwise(step["micro"]):
            if "edit" in str(micro["between"]) and not (earlier["sync"] or earlier["reshard"]):
                micro["between"] = None  # refused: the next microbatch uses what was gathered for this one
        if step["before"] == "assign_state" and (draw["tie"] or "twice" in draw["blocks"]):
            step["before"] = "sharded_state"  # assigning unties
        if draw["ignored"] and step["before"] in ("dcp_sharded", "assign_state"):
            step["before"] = "full_state"
        if draw["precision"] == "float64_over_float32":
            for micro in step["micro"]:
                if micro["kind"] == "autograd_grad":
                    micro["kind"] = "plain"
    return draw


# --- running --------------------------------------------------------------------------------------


class SettingsRun(Run):
    def __init__(self, draw: Draw, is_sharded: bool) -> None:
        self.layout = PLACES[draw["place"]][0]
        super().__init__(draw, is_sharded, *(self.layout.seat() if is_sharded else (0, 1)))
        self.side = Side(is_sharded)
        self.over32 = draw["precision"] == "float64_over_float32"
        torch.manual_seed(1234)
        model = Model(draw)
        self.model = model.float() if self.over32 else model.double()
        if is_sharded:
            self.model.seat = (self.index, self.count)
            shard(self.model, draw)
        else:
            self.model.checkpoint = None  # recomputing changes no number
            self.model.num_seats = math.prod(
                size
                for name, size in zip(self.layout.names, self.layout.shape, strict=True)
                if name in self.layout.data
            )
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        # torch has no foreach operations on DTensors of different meshes.
        foreach = {"adamw": None, "adamw_foreach": not self.is_mixed}
        return super().make_optimizer(foreach.get(self.draw["optimizer"], False))

    @property
    def is_mixed(self) -> bool:
        return bool(self.draw["ignored"] or self.draw["placement"] == "meshes" or "tp" in self.draw["place"])

    # --- the script ---

    def run(self) -> Notes:
        self.run_steps()
        return self.notes

    def act_before(self, number: int, step: Draw) -> None:
        self.place = f"step {number}, {step['before']}"
        self.act(step["before"], step)

    def train(self, number: int, step: Draw) -> None:
        self.zero_gradients(step["zero"])
        for micro in step["micro"]:
            self.act(micro["between"], step)
            if self.is_sharded:
                self.model.set_requires_gradient_sync(micro["sync"])
                self.model.set_requires_all_reduce(micro["all_reduce"])
                self.model.set_reshard_after_backward(micro["reshard"])
            getattr(self, f"micro_{micro['kind']}")()
        self.fill_zeros()
        self.note_gradients()
        if step["clip"] is not None:
            self.clip(step["clip"])
        self.optimizer.step()
        if self.is_sharded and step["micro"][-1]["reshard"] and not self.draw["ignored"]:
            self.side.assert_settled(self.model)

    def fill_zeros(self) -> None:
        """What set_reduce_scatter_unused_params and set_may_be_unused give unused parameters."""
        if self.is_sharded:
            return
        modules = [self.model] if self.draw["zeros"] else []
        if self.draw["skip"]:
            modules.append(self.model.blocks[self.model.left_out])
        for module in modules:
            for param in module.parameters():
                if param.requires_grad and param.grad is None and not self.is_ignored(param):
                    param.grad = torch.zeros_like(param)

    def is_ignored(self, param: nn.Parameter) -> bool:
        return bool(self.draw["ignored"]) and param is self.model.outlet.bias

    def clip(self, limit: float) -> None:
        if not self.is_mixed:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
            self.note("norm", full(norm))
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([full(g).norm() for g in gradients]).norm()  # type: ignore[union-attr]
        self.note("norm", norm)
        for gradient in gradients:
            gradient.mul_(min(1.0, limit / (norm.item() + 1e-6)))

    # --- microbatches ---

    def call(self, module: nn.Module, x: Tensor) -> Tensor:
        if self.over32 and not self.is_sharded:
            wide = {n: p.double() for n, p in module.named_parameters() if p.is_floating_point()}
            return torch.func.functional_call(module, wide, (x,))
        return module(x)

    def loss(self, x: Tensor | None = None) -> Tensor:
        x = self.batch() if x is None else x
        loss = (self.call(self.model, x) - x.detach()).pow(2).mean()
        self.note("loss", loss, "mean")
        return loss

    def micro_input_grad(self) -> None:
        x = self.batch().requires_grad_()
        self.loss(x).backward()
        assert x.grad is not None
        self.note("input gradient", x.grad.pow(2).sum() / self.count, "mean")

    def micro_autograd_grad(self) -> None:
        if self.draw["checkpoint"] != "reentrant":  # which only backward() can run
            x = self.batch().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(x), [x])
            self.note("input gradient", gradient.pow(2).sum() / self.count, "mean")
        self.loss().backward()

    def micro_fails_first(self) -> None:
        """A forward that fails leaves nothing, so accumulation goes on."""
        self.fail_forward(0)
        self.loss().backward()

    # --- between steps ---

    def act(self, what: str | None, step: Draw) -> None:
        block = self.model.blocks[step["target"]]
        if what in SIMPLE_ACTS:
            SIMPLE_ACTS[what](self, block, step)
        elif what is not None:
            getattr(self, f"do_{what}")(block, step)

    def do_inference(self, block: nn.Module, step: Draw) -> None:
        with torch.inference_mode():
            output = self.call(self.model, self.batch())
            value = output.double().pow(2).mean()
        self.note("output", value, "mean")

    def do_eval_block(self, block: nn.Module, step: Draw) -> None:
        groups = groups_of(self.model, self.draw)
        if block in [
            module for group in groups for module in (group if isinstance(group, list) else [group])
        ]:
            self.evaluate(block)

    def do_assign_state(self, block: nn.Module, step: Draw) -> None:
        self.through_state(full_values=False, assign=True)
        self.optimizer = self.make_optimizer()

    def do_dcp_full(self, block: nn.Module, step: Draw) -> None:
        # Uneven rows of tensor parallel weights: torch's function takes them by this option only
        # (test_tensor_parallel.py).
        broadcast = self.draw["place"].startswith("tp") and self.draw["sizes"] != "even"
        self.through_dcp(StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast))

    def do_deepcopy(self, block: nn.Module, step: Draw) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizer = self.make_optimizer()

    def do_unfreeze(self, block: nn.Module, step: Draw) -> None:
        for param in self.model.parameters():
            if param.is_floating_point():
                param.requires_grad_(True)

    def fail_in(self, module: nn.Module, hook: Any) -> None:
        handle = module.register_forward_hook(hook)
        with suppress(Failure):  # some layers are never called
            self.call(self.model, self.batch())
        handle.remove()

    def do_fail_backward(self, block: nn.Module, step: Draw) -> None:
        assert self.fail_in_backward(block)

    def do_unshard(self, block: nn.Module, step: Draw) -> None:
        if isinstance(block, FSDPModule):
            block.unshard()
            block.reshard()

    def do_unshard_async(self, block: nn.Module, step: Draw) -> None:
        for module in (self.model, block) if self.is_sharded else ():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)

    def do_unshard_edit(self, block: nn.Module, step: Draw) -> None:
        """What was unsharded ahead is not what the next forward uses."""
        self.do_unshard_async(block, step)
        self.scale(0.9)

    def do_waste(self, block: nn.Module, step: Draw) -> None:
        """A backward without synchronisation, whose gradients the step's zero_grad clears."""
        if self.is_sharded:
            self.model.set_requires_gradient_sync(False)
        self.loss().backward()

    def do_waste_reset(self, block: nn.Module, step: Draw) -> None:
        self.do_waste(block, step)
        if self.is_sharded:
            self.model.reset_iter_state()
        self.optimizer.zero_grad()

    def do_resharding(self, block: nn.Module, step: Draw) -> None:
        if self.is_sharded:
            self.model.set_reshard_after_forward(step["target"] % 2 == 0)


SIMPLE_ACTS: dict[str | None, Callable[[SettingsRun, nn.Module, Draw], Any]] = {
    "eval": lambda run, block, step: run.evaluate(run.model),
    "eval_grad": lambda run, block, step: run.loss(),
    "full_state": lambda run, block, step: run.through_state(full_values=True),
    "sharded_state": lambda run, block, step: run.through_state(full_values=False),
    "dcp_sharded": lambda run, block, step: run.through_dcp(StateDictOptions()),
    "optimizer_state": lambda run, block, step: run.reload_optimizer(),
    "freeze": lambda run, block, step: block.requires_grad_(False),
    "fail_forward": lambda run, block, step: run.fail_forward(step["target"]),
    "fail_block": lambda run, block, step: run.fail_in(block, fail),
    "fail_inside": lambda run, block, step: run.fail_in(list(block.modules())[-1], fail),
    "edit": lambda run, block, step: run.scale(0.9),
    "edit_data": lambda run, block, step: run.scale(0.9, through_data=True),
}


def run_sharded(draw: Draw) -> Notes:
    with emptying_buffers(draw):
        return SettingsRun(draw, is_sharded=True).run()


def run_draw(worlds: Worlds, draw: Draw, folder: Path) -> str | None:
    with one_thread():
        plain = SettingsRun(draw, is_sharded=False).run()
    world = worlds[PLACES[draw["place"]][0].size]
    ranks = world.run(run_sharded, draw, timeout=CAMPAIGN.timeout_s())
    return difference(plain, ranks, PRECISIONS[draw["precision"]][1])


# --- tests ----------------------------------------------------------------------------------------

CAMPAIGN = Campaign("SETTINGS", DRAWS, settled, run_draw)


def test_draws_train_as_plainly(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=4)


@pytest.mark.slow
def test_many_draws_train_as_plainly(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=300)
