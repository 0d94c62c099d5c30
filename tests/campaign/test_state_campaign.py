"""Random journeys of a training run: from one way of spreading a model to the next, by any means of saving.

A draw is a dict of plain values: a model, an optimizer, and legs. Each leg runs on ranks of its own, begins with
what the leg before has saved (whatever its own model has done before that), trains on, is disturbed by calls that
change nothing or are refused, and saves. Plain PyTorch makes the same journey in one process, handing over by
name; losses, parameters, buffers and optimizer states must agree on every rank.

    STATE_DRAW="{...}" pytest -m slow -s tests/campaign/test_state_campaign.py
    STATE_SEED=5000 STATE_DRAWS=400 pytest -m slow -s tests/campaign/test_state_campaign.py
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arrangements import BUILDS, Way, built
from comparing import assert_equal
from meshed import BATCH_SIZE, part, refusal
from models import random_batch
from reference import full
from scenario import one_thread
from torch import Tensor, nn

import shardwise
from campaign.campaign import Campaign, Worlds
from campaign.draws import Draw, choice, many, rarely, record, some
from campaign.notes import Notes, close, difference
from shardwise import (
    full_state_dict,
    inference,
    latest_checkpoint,
    load_checkpoint,
    load_full_state_dict,
    materialize,
    no_sync,
    save_checkpoint,
    unsharded,
)
from shardwise.engine.module_state import sharded_module_states
from shardwise.init import check_replicas, sync_module_states
from shardwise.state import (
    EMA,
    iter_full_parameters,
    load_full_optimizer_state_dict,
    rekey_optimizer_state_dict,
    save_safetensors,
)

DECAY = 0.7
GARBAGE_SEED = 77

# --- ways -----------------------------------------------------------------------------------------

# Kinds by the ranks they need at least; those of ALIKE see the same data everywhere, since not all gradients
# are averaged there, or not over all ranks.
KINDS = {
    "plain": 1, "root only": 1, "blocks only": 1, "ddp": 1, "zero1": 1, "zero2": 1, "zero3": 1, "columns": 2,
    "offload": 1, "keeps": 1, "reshards to 2": 4, "hybrid": 4, "hybrid_zero2": 4, "tp": 4, "none": 1,
    "ignored": 2, "one list": 2, "mixed": 2, "bf16": 2,
}  # fmt: skip
ALIKE = ("none", "blocks only", "tp", "ignored")


@torch.no_grad()
def init(module: nn.Module) -> None:
    """For modules of tests, which have parameters beside children and no `reset_parameters`."""
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            param.uniform_(-0.3, 0.3)
        else:
            param.zero_()
    for name, buffer in module.named_buffers(recurse=False):
        buffer.fill_(2 if name == "scale" else 1)


# --- optimizers -----------------------------------------------------------------------------------


def two_groups(make: Callable[..., Any]) -> Callable[..., torch.optim.Optimizer]:
    def both(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        matrices = [p for p in params if p.dim() > 1]
        groups = [
            {"params": [p for p in params if p.dim() < 2], "lr": 0.02},
            {"params": matrices, "weight_decay": 0.1},
        ]
        return make(groups, lr=0.01, **options)

    return both


# Not NAdam: torch's own `load_state_dict` makes its `mu_product` float64, where it was float32.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": two_groups(torch.optim.AdamW),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "bare sgd": lambda params: torch.optim.SGD(params, lr=0.02),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adagrad": two_groups(torch.optim.Adagrad),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "adamax": two_groups(torch.optim.Adamax),
}


# --- draws ----------------------------------------------------------------------------------------

DISTURBANCES = [
    "nothing", "refused", "refused optimizer", "refused checkpoint", "refused files", "rollback", "gradients",
    "no_sync", "unsharded", "inference", "replicas", "swap", "saves", "edit", "copy",
]  # fmt: skip
SAVES = (
    "checkpoint",
    "asynchronous",
    "full",
    "full everywhere",
    "safetensors",
    "iterator",
    "state_dict",
    "dcp",
)
LOAD = record(
    {
        "src": choice(0, 0, "last", None),
        "as": choice("dict", "iterator"),
        "keys": choice("name", "id"),
        "inside": choice(*("nothing",) * 5, "inference"),
        "twice": rarely(7),
    }
)
LEG = record(
    {
        "ranks": choice(1, 2, 2, 3, 4, 4),
        "kind": choice(*KINDS),
        "start": choice("cpu", "cpu", "meta", "materialized"),
        "used": choice(0, 0, 1, 2),
        "backward": rarely(3),
        "before": some(*DISTURBANCES, most=2),
        "load": LOAD,
        "steps": choice(1, 0, 2, 3),
        "middle": some(*DISTURBANCES, most=2),
        "save": choice(*SAVES),
        "later": choice(0, 1, 2),
        "order": choice("model", "model", "reversed"),
    }
)
DRAWS = record(
    {
        "legs": many(LEG, least=2, most=3),
        "build": choice(*BUILDS),
        "optimizer": choice(*OPTIMIZERS),
        "frozen": some("inlet.bias", "blocks.0", "outlet.weight", "blocks.1", most=2),
        "only_trained": rarely(3),
        "schedule": rarely(3),
        "ema": choice(False, False, False, True, True),
    }
)


def settled(draw: Draw) -> Draw:
    """Without what is documented not to go together."""
    draw = copy.deepcopy(draw)
    previous: Draw | None = None
    for number, leg in enumerate(draw["legs"]):
        settle_kind(leg, draw["build"])
        if number == 0:
            leg["steps"] = max(leg["steps"], 1)
            leg["start"] = "cpu"  # the plain run draws the same values
        if leg["start"] == "meta":  # nothing may run before it has values; buffers of no state have none
            leg |= {"used": 0, "backward": False, "before": []}
            if draw["build"] == "tied":
                leg["start"] = "materialized"
        # By id counts in the order of the optimizer, which is to be the same.
        if previous is not None and leg["order"] != previous["order"]:
            leg["load"]["keys"] = "name"
        if leg["kind"] == "none":  # nothing is sharded, which inference() refuses
            for when in ("before", "middle"):
                leg[when] = [each for each in leg[when] if each != "inference"]
        if leg["kind"] == "bf16":  # other numbers than the plain run's: only what it hands over is compared
            leg["middle"] = [each for each in leg["middle"] if each != "edit"]
        if leg["save"] == "dcp" and draw["optimizer"] != "adamw":
            leg["save"] = "checkpoint"
        previous = leg
    return draw


def settle_kind(leg: Draw, build: str) -> None:
    # torch's plan of columns and rows takes no hidden size that does not divide; batch norm in float64 no bfloat16.
    if (leg["kind"] == "tp" and build != "even") or (leg["kind"] == "bf16" and build == "tied"):
        leg["kind"] = "plain"
    leg["ranks"] = max(leg["ranks"], KINDS[leg["kind"]])


# --- one leg --------------------------------------------------------------------------------------


class Leg:
    """One leg, on every rank of a world or plainly. Notes what must agree."""

    def __init__(self, draw: Draw, number: int, folder: str, is_sharded: bool) -> None:
        self.draw, self.leg, self.number = draw, draw["legs"][number], number
        self.folder = Path(folder)
        self.is_sharded = is_sharded
        self.notes: Notes = []
        self.is_exact = self.leg["kind"] != "bf16"
        self.step = 0

    @property
    def place(self) -> Path:
        return self.folder / f"leg-{self.number}"

    # --- what is trained ---

    def build(self) -> None:
        draw, leg = self.draw, self.leg
        on_meta = self.is_sharded and leg["start"] != "cpu"
        with torch.device("meta" if on_meta else "cpu"):
            model = built(draw["build"], self.number)
        for name, param in model.named_parameters():
            if any(name.startswith(each) for each in draw["frozen"]):
                param.requires_grad_(False)
        if self.is_sharded:
            Way(leg["ranks"], leg["kind"]).spread(model)
        self.model = model
        if on_meta and leg["start"] == "materialized":
            materialize(model, init)
        self.optimizer = self.make_optimizer()
        self.ema: Any = None

    def make_optimizer(self) -> torch.optim.Optimizer:
        params = list(self.model.parameters())
        if self.draw["only_trained"]:
            params = [p for p in params if p.requires_grad]
        if self.leg["order"] == "reversed":
            params.reverse()
        return OPTIMIZERS[self.draw["optimizer"]](params)

    def batch(self, step: int) -> Tensor:
        width = {"even": 8, "uneven": 7, "odd": 8, "tied": 1}[self.draw["build"]]
        batch = random_batch(step, BATCH_SIZE, width)
        if self.draw["build"] == "tied":
            batch = (batch.abs() * 1e6).long().squeeze(1) % 11
        # Batch norm sees its rank's rows.
        if not self.is_sharded or self.leg["kind"] in ALIKE or self.draw["build"] == "tied":
            return batch
        return part(batch, dist.get_rank(), dist.get_world_size())

    def loss(self, step: int) -> Tensor:
        return (self.model(self.batch(step)) - 0.3).pow(2).mean()

    def train(self, steps: int, start: int | None = None) -> None:
        for number in range(steps):
            self.optimizer.zero_grad()
            loss = self.loss(self.step if start is None else start + number)
            loss.backward()
            self.optimizer.step()
            if self.draw["schedule"]:
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.9
            if self.ema is not None and start is None:
                self.ema.update()
            if start is None:
                self.step += 1
                self.note_mean("loss", loss)

    # --- noting ---

    def note(self, name: str, value: Any) -> None:
        self.notes.append((name, "same", full(value) if isinstance(value, Tensor) else value))

    def note_mean(self, name: str, value: Tensor) -> None:
        value = value.detach().clone()
        if self.is_sharded:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        if self.is_exact:
            self.note(name, value)
        else:
            assert value.isfinite()
            self.note(name, None)

    def state(self) -> Draw:
        """Everything, by name, whole; by other means than those that are tested."""
        params, names = {}, {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            params[name] = full(param)
            names.setdefault(param, name)
        states = {}
        for param, own in self.optimizer.state.items():
            states[names[param]] = {k: full(v) if isinstance(v, Tensor) else v for k, v in own.items()}
        groups = [
            {"params": [names[p] for p in group["params"]], "lr": group["lr"]}
            for group in self.optimizer.param_groups
        ]
        buffers = {name: full(buffer) for name, buffer in self.model.named_buffers()}
        return {"params": params, "buffers": buffers, "states": states, "groups": groups, "step": self.step}

    def adopt(self, state: Draw) -> None:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(state["params"][name])
            persistent = self.model.state_dict()
            for name, buffer in self.model.named_buffers():
                if name in persistent:
                    buffer.copy_(state["buffers"][name])
        named = dict(self.model.named_parameters(remove_duplicate=False))
        self.optimizer.state.clear()
        for name, own in state["states"].items():
            self.optimizer.state[named[name]] = copy.deepcopy(own)
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            assert {id(named[n]) for n in saved["params"]} == {id(p) for p in group["params"]}
            group["lr"] = saved["lr"]
        self.step = state["step"]

    def note_state(self, what: str, state: Draw) -> None:
        order = sorted(state["states"])
        self.note(f"{what}: names of states", [(n, sorted(state["states"][n])) for n in order])
        self.note(f"{what}: rates", [group["lr"] for group in state["groups"]])
        for kind in ("params", "buffers"):
            for name, value in state[kind].items():
                self.note(f"{what}: {name}", value)
        for name in order:
            for key, value in sorted(state["states"][name].items()):
                self.note(f"{what}: {key} of {name}", value)

    # --- the leg ---

    def run(self, before: Any) -> tuple[list[Any], Any, Draw | None]:
        """Notes, what the next leg loads, and the state that this is."""
        torch.manual_seed(1000 + self.number)
        self.build()
        if before is not None:
            if self.leg["used"]:
                self.train(self.leg["used"], GARBAGE_SEED)
            if self.leg["backward"]:
                self.loss(GARBAGE_SEED).backward()
            for each in self.leg["before"]:
                self.disturb(each)
            self.load(before)
            self.note_state("loaded", self.state())
        if self.draw["ema"]:
            self.ema = EMA(self.model, DECAY) if self.is_sharded else PlainEMA(self.model)
        middle = list(self.leg["middle"])
        for _ in range(self.leg["steps"]):
            self.train(1)
            if middle:
                self.disturb(middle.pop())
        for each in middle:
            self.disturb(each)
        payload, pending = self.save()
        state = self.state()
        if self.ema is not None and self.is_exact:
            self.note_average()
        self.train(self.leg["later"])
        if pending is not None:
            pending.wait()
        if self.is_exact:
            self.note_state("end", self.state())
        return self.notes, payload, state

    def note_average(self) -> None:
        if self.is_sharded:
            before = {n: full(p) for n, p in self.model.named_parameters()}
            with self.ema.swap():
                inside = {n: full(p) for n, p in self.model.named_parameters()}
            for name, param in self.model.named_parameters():
                assert torch.equal(full(param), before[name])
        else:
            inside = self.ema.inside()
        for name, value in inside.items():
            self.note(f"average of {name}", value)

    # --- saving ---

    def save(self) -> tuple[Any, Any]:
        if not self.is_sharded:
            return None, None
        how = self.leg["save"]
        shared = {"step": self.step}
        if how in ("checkpoint", "asynchronous"):
            pending = save_checkpoint(
                self.place, self.model, self.optimizer, shared=shared, asynchronous=how == "asynchronous"
            )
            return {"how": how, "path": str(self.place), **shared}, pending
        if how == "dcp":
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.state_dict import get_state_dict

            first, second = get_state_dict(self.model, self.optimizer)
            dcp.save({"model": first, "optimizer": second}, checkpoint_id=str(self.place))
            return {"how": how, "path": str(self.place), **shared}, None
        everywhere = how == "full everywhere"
        model, states = full_state_dict(self.model, self.optimizer, rank0_only=not everywhere)
        owner = dist.get_rank() == 0 or everywhere
        assert bool(model) == owner
        if how == "safetensors":
            save_safetensors(self.model, self.place, max_shard_bytes=600)
            model = str(self.place)
        elif how == "iterator":
            found = {n: t.clone() for n, t in iter_full_parameters(self.model, bucket_bytes=2000)}
            kept = self.model.state_dict()
            buffers = {n: b.clone() for n, b in self.model.named_buffers() if n in kept}
            model = found | buffers
        elif how == "state_dict":
            model = {n: full(v) for n, v in copy.deepcopy(self.model.state_dict()).items()}
        by_id = rekey_optimizer_state_dict(states, self.model, self.optimizer, "id") if owner else None
        return {"how": how, "model": model, "name": states, "id": by_id, **shared}, None

    # --- loading ---

    def load(self, before: Any) -> None:
        if not self.is_sharded:
            self.adopt(before)
            return
        how = self.leg["load"]
        times = 1 + how["twice"]
        if how["inside"] == "inference" and self.leg["start"] != "meta" and sharded_module_states(self.model):
            self.model.eval()
            with inference(self.model):  # what was unsharded is not used any more
                self.model(self.batch(3))
                self.load_once(before, how)
            self.model.train()
            times -= 1
        for _ in range(times):
            self.load_once(before, how)
        self.step = before["step"]

    def load_once(self, before: Any, how: Draw) -> None:
        if "path" in before:
            loaded = load_checkpoint(before["path"], self.model, self.optimizer)
            if before["how"] != "dcp":
                assert loaded.shared == {"step": before["step"]}
                assert latest_checkpoint(Path(before["path"]).parent) is not None
            return
        src = dist.get_world_size() - 1 if how["src"] == "last" else how["src"]
        mine = src is None or src == dist.get_rank()
        if isinstance(before["model"], str):
            report = load_full_state_dict(self.model, before["model"])
        elif before["how"] == "state_dict" and self.leg["start"] != "meta":
            report = None
            self.model.load_state_dict(before["model"])
        else:
            source = before["model"] if mine else None
            if mine and how["as"] == "iterator":
                source = iter(list(source.items()))
            report = load_full_state_dict(self.model, source, src_rank=src)
        if report is not None:
            assert report == shardwise.state.LoadReport()
        states = before[how["keys"]] if mine else None
        load_full_optimizer_state_dict(self.model, self.optimizer, states, src_rank=src)

    # --- what changes nothing, or the same on both sides ---

    def disturb(self, kind: str) -> None:
        if kind in ("edit", "no_sync", "gradients") or self.is_sharded:
            getattr(self, "do_" + kind.replace(" ", "_"))()

    def do_nothing(self) -> None:
        pass

    def do_edit(self) -> None:
        """In `unsharded`, where the sharded model shows plain parameters."""
        is_lent = self.is_sharded and sharded_module_states(self.model)
        with torch.no_grad(), unsharded(self.model) if is_lent else nullcontext():
            for param in self.model.parameters():
                if param.is_floating_point():
                    param.mul_(0.9)

    def do_gradients(self) -> None:
        self.loss(GARBAGE_SEED).backward()

    def do_no_sync(self) -> None:
        if self.is_sharded and sharded_module_states(self.model):
            with no_sync(self.model):
                self.loss(GARBAGE_SEED).backward()
        else:
            self.loss(GARBAGE_SEED).backward()

    def do_unsharded(self) -> None:
        """No function on states runs there."""
        if not sharded_module_states(self.model):
            return
        with unsharded(self.model):
            for call in (full_state_dict, iter_full_parameters, EMA):
                refusal(call, self.model)
            refusal(load_full_state_dict, self.model, {}, strict=False)
            refusal(save_safetensors, self.model, self.folder / "no")

    def do_inference(self) -> None:
        self.model.eval()
        with inference(self.model):
            self.model(self.batch(5))
        self.model.train()

    def do_replicas(self) -> None:
        if self.leg["kind"] not in ("none",) and self.draw["build"] != "tied":
            check_replicas(self.model)
        sync_module_states(self.model)

    def do_swap(self) -> None:
        ema = EMA(self.model, 0.5)
        self.scale(0.5)
        ema.update()
        with ema.swap():
            full_state_dict(self.model)
            self.model.eval()
            with torch.no_grad():
                self.model(self.batch(5))
            self.model.train()
        self.scale(2)

    def do_saves(self) -> None:
        place = self.folder / f"other-{self.number}-{len(self.notes)}"
        save_checkpoint(place, self.model, self.optimizer)
        full_state_dict(self.model, self.optimizer)
        list(iter_full_parameters(self.model, dtype=torch.bfloat16))

    def do_copy(self) -> None:
        model = copy.deepcopy(self.model)
        before = self.optimizer.state_dict()
        if self.ema is not None:
            return  # an average is of one model
        self.model = model
        self.optimizer = self.make_optimizer()
        self.optimizer.load_state_dict(copy.deepcopy(before))

    def do_rollback(self) -> None:
        state = copy.deepcopy(self.model.state_dict())
        states = copy.deepcopy(self.optimizer.state_dict())
        self.train(2, GARBAGE_SEED)
        self.model.load_state_dict(state)
        self.optimizer.load_state_dict(states)

    def do_refused(self) -> None:
        good = full_state_dict(self.model, rank0_only=False)
        names = [n for n, v in good.items() if v.numel() and v.is_floating_point()]
        name, last = names[0], names[-1]
        wrong = [
            good | {name: good[name].new_zeros(99)},
            good | {last: good[last].float()},
            good | {"one more": torch.ones(1)},
            {n: v for n, v in good.items() if n not in self.aliases(last)},
            {},
        ]
        for source in wrong:
            for src in (0, None):
                mine = src is None or dist.get_rank() == 0
                self.refused(load_full_state_dict, self.model, source if mine else None, src_rank=src)

    def aliases(self, name: str) -> list[str]:
        every = dict(self.model.named_parameters(remove_duplicate=False))
        return [n for n in [name, *every] if n == name or (name in every and every[n] is every[name])]

    def do_refused_optimizer(self) -> None:
        _, good = full_state_dict(self.model, self.optimizer, rank0_only=False)
        wrong: list[Any] = [
            {**good, "state": {"nope": {"step": torch.tensor(1.0)}}},
            {**good, "param_groups": good["param_groups"][:-1]},
            {"state": {}},
            3,
        ]
        if good["state"]:
            first = next(n for n in good["state"])
            wrong.append({**good, "state": {**good["state"], first: {"exp_avg_of": torch.ones(9, 9, 9)}}})
        for source in wrong:
            mine = dist.get_rank() == 0
            self.refused(load_full_optimizer_state_dict, self.model, self.optimizer, source if mine else None)

    def do_refused_checkpoint(self) -> None:
        place = self.folder / f"refused-{self.number}-{len(self.notes)}"
        save_checkpoint(place, self.model, self.optimizer)
        other = torch.optim.ASGD(self.model.parameters())
        self.refused(load_checkpoint, place, self.model, other)
        self.refused(load_checkpoint, place / "nowhere", self.model, self.optimizer)
        if dist.get_rank() == 0:
            file = max(place.glob("*.distcp"), key=lambda each: each.stat().st_size)
            with open(file, "r+b") as handle:
                handle.truncate(file.stat().st_size // 2)
        dist.barrier()
        self.refused(load_checkpoint, place, self.model, self.optimizer)
        small = nn.Linear(2, 2)
        self.refused(load_checkpoint, place, small)

    def do_refused_files(self) -> None:
        place = self.folder / f"files-{self.number}-{len(self.notes)}"
        save_safetensors(self.model, place, max_shard_bytes=600)
        self.refused(save_safetensors, self.model, place)
        dist.barrier()
        if dist.get_rank() == 0:
            file = max(place.glob("*.safetensors"), key=lambda each: each.stat().st_size)
            with open(file, "r+b") as handle:
                handle.truncate(file.stat().st_size // 2)
        dist.barrier()
        self.refused(load_full_state_dict, self.model, place)
        self.refused(load_full_state_dict, self.model, self.folder / "nowhere")

    def refused(self, call: Any, *args: Any, **options: Any) -> None:
        before = self.state()
        refusal(call, *args, **options)
        assert_equal(self.state(), before)

    def scale(self, factor: float) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                if param.is_floating_point():
                    param.mul_(factor)


class PlainEMA:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.averages = {n: p.detach().clone() for n, p in model.named_parameters() if self.counts(p)}

    def counts(self, param: Tensor) -> bool:
        return param.is_floating_point() and param.requires_grad

    @torch.no_grad()
    def update(self) -> None:
        for name, param in self.model.named_parameters():
            if name in self.averages:
                self.averages[name].mul_(DECAY).add_(param, alpha=1 - DECAY)

    def inside(self) -> dict[str, Tensor]:
        return {n: self.averages.get(n, p).detach().clone() for n, p in self.model.named_parameters()}


# --- a journey ------------------------------------------------------------------------------------


def run_leg(draw: Draw, number: int, folder: str, before: Any) -> Any:
    return Leg(draw, number, folder, True).run(before)


def run_draw(worlds: Worlds, draw: Draw, folder: Path) -> str | None:
    before: Any = None
    plain_before: Any = None
    for number, leg in enumerate(draw["legs"]):
        ranks = worlds[leg["ranks"]].run(
            run_leg, draw, number, str(folder), before, timeout=CAMPAIGN.timeout_s()
        )
        with one_thread():
            plain = Leg(draw, number, str(folder), False)
            plain.is_exact = leg["kind"] != "bf16"
            notes, _, plain_state = plain.run(plain_before)
        if (wrong := difference(notes, [rank[0] for rank in ranks], close(1e-10, 1e-10))) is not None:
            return f"leg {number}: {wrong}"
        if leg["kind"] == "bf16":  # go on from where the ranks are
            plain_state = ranks[0][2]
        before, plain_before = ranks[0][1], plain_state
    return None


# --- tests ----------------------------------------------------------------------------------------

CAMPAIGN = Campaign("STATE", DRAWS, settled, run_draw)


def test_journeys_end_where_plain_training_does(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=2)


@pytest.mark.slow
def test_many_journeys_end_where_plain_training_does(worlds: Worlds, tmp_path: Path) -> None:
    CAMPAIGN.check_many(worlds, tmp_path, num_draws=75)
