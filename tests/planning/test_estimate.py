"""What an estimate says of a small model, what it leaves as it was, and what it refuses."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from models import LanguageModel, Tower
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.dry_run.fakes import fake_world
from shardwise.dry_run.memory_log import GRADIENTS, PARAMETERS, STATE
from shardwise.planning import estimate
from shardwise.planning.picture import figure_of
from shardwise.torch_compat import c10d

pytestmark = pytest.mark.processes  # steps of whole models: seconds


def on_meta(**sizes: int) -> nn.Module:
    with torch.device("meta"):
        return Tower(**({"width": 512, "hidden": 2048, "depth": 3} | sizes))


BATCH = torch.empty(16, 512, device="meta")
PLAIN: dict[str, Any] = {"world": 2, "strategy": "zero3", "batch": BATCH, "activation_checkpointing": False}


def test_a_table_for_people() -> None:
    found = estimate(
        on_meta(),
        world="2x4",
        strategy=["ddp", "zero2", "hybrid"],
        batch=BATCH,
        mp_policy="bf16",
        memory="100MB",
        device="cpu",
    )
    assert_expected_inline(
        str(found),
        """\
Tower, 2x4 ranks, batch float32 (16, 512): 6,565,377 parameters; MB on each rank

strategy    checkpointing  parameters  gradients  state  unsharded  activations  forward  backward  optimizer  peak in               sent                         fits
----------------------------------------------------------------------------------------------------------------------------------------------------------------------
ddp 8       no                  26.26      26.26  52.52       8.93        10.79   113.23    123.72     114.00  backward of blocks.2  replicate 45.96              no
ddp 8       yes                 26.26      26.26  52.52       8.93        10.63   113.14    123.55     114.00  backward of blocks.2  replicate 45.96              no
zero2 8     no                   3.28       3.28   6.57      13.14         2.52    24.59     53.76      15.94  backward of blocks.1  shard 34.49                  yes
zero2 8     yes                  3.28       3.28   6.57      13.14         2.36    24.41     53.67      15.94  backward of blocks.1  shard 34.49                  yes
hybrid 2x4  no                   6.57       6.57  13.13       8.93         2.52    31.09     63.65      29.12  backward of blocks.1  shard 35.85, replicate 6.57  yes
hybrid 2x4  yes                  6.57       6.57  13.13       8.93         2.36    31.01     63.57      29.12  backward of blocks.1  shard 35.85, replicate 6.57  yes

4 of 6 fit in 100.00 MB; zero2 sends least of them.""",
    )


def test_keyword_arguments_of_a_batch_are_named() -> None:
    found = estimate(on_meta(depth=1), **PLAIN | {"batch": {"x": BATCH}})
    assert found.model == f"Tower, {PLAIN['world']} ranks, batch x float32 (16, 512)"


def test_a_step_takes_at_least_its_arithmetic_or_its_traffic() -> None:
    """2 FLOPs for each weight of a matrix and row in forward, twice that in backward (once for the first matrix, whose
    inputs need no gradient), and forward again for what is recomputed."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    batch = torch.empty(16, 64, device="meta")
    arguments = {"world": 4, "strategy": "zero2", "batch": batch, "flops": 1e9}
    plain, again = estimate(model, **arguments, bandwidth="1TB/s").rows
    one = 2 * 16 * 64 * 64
    assert plain.flops == (3 * 4 - 1) * one
    assert again.flops == plain.flops + 4 * one
    assert plain.seconds == plain.flops / 1e9
    assert (plain.utilization, again.utilization) == (1, pytest.approx(11 / 15))
    (slow, _) = estimate(model, **arguments, bandwidth={"shard": 1000}).rows
    assert slow.seconds == slow.sent["shard"] / 1000
    assert slow.utilization == pytest.approx(plain.flops / 1e9 / slow.seconds)


def test_what_will_be_compiled_is_counted_as_it_is() -> None:
    plain, compiled = (
        estimate(on_meta(), **PLAIN, compile=wanted) for wanted in (False, {"backend": "eager"})
    )
    assert compiled.rows == plain.rows
    assert "counted without compile" in str(compiled)
    assert "compile" not in str(plain)


def test_the_largest_batch_is_the_last_that_fits() -> None:
    arguments = PLAIN | {"world": 4, "memory": "150MB"}
    runs: list[str] = []
    (row,) = estimate(
        on_meta(depth=1), **arguments, largest_batch=True, progress=lambda *told: runs.append(told[2])
    ).rows
    assert len(runs) <= 10
    assert row.largest_batch is not None
    assert row.largest_batch > 16
    for size in (row.largest_batch, row.largest_batch + 1):
        batch = torch.empty(size, 512, device="meta")
        (other,) = estimate(on_meta(depth=1), **arguments | {"batch": batch}).rows
        assert (other.peak.num_bytes <= 150e6) == (size == row.largest_batch)


def test_a_batch_that_does_not_fit_is_made_smaller() -> None:
    arguments = PLAIN | {"batch": "4096x512:fp32", "largest_batch": True}
    found = estimate(on_meta(depth=1), **arguments, memory="100MB")
    assert found.rows[0].peak.num_bytes > 100e6
    assert 0 < (found.rows[0].largest_batch or 0) < 4096
    found = estimate(on_meta(depth=1), **arguments, memory="1MB")
    assert found.rows[0].largest_batch == 0
    assert "largest batch" in str(found)


@pytest.mark.slow
def test_what_would_have_to_change_where_nothing_fits() -> None:
    found = estimate(on_meta(), **PLAIN, memory="45MB")
    assert not found.fitting()
    assert_expected_inline(
        str(found).partition("\n\nNone")[2],
        """\
 fits in 45.00 MB: zero3 needs the least, and is 37.77 MB over.
  16 ranks: 40.98 MB, fits
  shards, gradients and optimizer in host memory: 51.78 MB, does not fit
  computing in bf16: 75.84 MB, does not fit
  activation checkpointing: 82.61 MB, does not fit
  activation checkpointing, with activations in host memory: 82.61 MB, does not fit
  strategy zero2: 82.76 MB, does not fit""",
    )
    # Each change does what it says.
    (by_ranks,) = [change for change in found.changes if change.what.endswith("ranks")]
    assert by_ranks.fits
    again = estimate(on_meta(), **PLAIN | {"world": int(by_ranks.what.split()[0])})
    assert again.rows[0].peak.num_bytes == by_ranks.num_bytes < 45e6


def test_the_formulas_of_the_strategies() -> None:
    """Whole parameters of P bytes on 4 ranks, all dims even: the shard of each, and what it sends."""
    model = on_meta()
    whole = sum(p.numel() * 4 for p in model.parameters())
    rows = {row.strategy: row for row in estimate(model, world=(2, 2)).rows}
    shards_of = {"ddp": 1, "zero1": 4, "zero2": 4, "zero3": 4, "zero3_hpz": 4, "hybrid": 2, "hybrid_zero2": 2}
    for name, shards in shards_of.items():
        row = rows[name]
        assert row.parameters == pytest.approx(whole / shards, rel=0.003)
        assert row.gradients == pytest.approx(whole / shards, rel=0.003)
        assert row.optimizer_state == pytest.approx(2 * whole / shards, rel=0.003)
    assert rows["ddp"].sent == {"replicate": pytest.approx(2 * whole * 3 / 4, rel=0.003)}
    for name in ("zero1", "zero2"):
        assert rows[name].sent == {"shard": pytest.approx(2 * whole * 3 / 4, rel=0.003)}
    assert rows["hybrid_zero2"].sent == {
        "replicate": pytest.approx(whole / 2, rel=0.003),
        "shard": pytest.approx(2 * whole / 2, rel=0.003),
    }
    # All ranks gather once, and reduce once; a host of two gathers what it has kept.
    assert rows["zero3_hpz"].sent == {
        "replicate": pytest.approx(2 * whole * 3 / 4, rel=0.003),
        "shard": pytest.approx(whole / 2, rel=0.003),
    }
    # Of zero3 the root and the last block travel twice.
    twice = [model.inlet, model.outlet, model.blocks[-1]]  # type: ignore[attr-defined]
    kept = sum(p.numel() * 4 for module in twice for p in module.parameters())
    assert rows["zero3"].sent == {"shard": pytest.approx((3 * whole - kept) * 3 / 4, rel=0.003)}


def test_every_optimizer_by_name() -> None:
    names = ("adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop", "adafactor")
    state = {
        name: estimate(on_meta(depth=1), world=2, strategy="zero3", optimizer=optimizer)
        .rows[0]
        .optimizer_state
        for name, optimizer in [*((name, name) for name in names), ("own", torch.optim.Rprop)]
    }
    one = state["sgd-momentum"]
    assert {name: round(size / one, 1) for name, size in state.items()} == {
        "adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adagrad": 1, "rmsprop": 1, "adafactor": 0, "own": 2,
    }  # fmt: skip


def test_muon_has_one_state_of_matrices_and_adamws_two_of_the_rest() -> None:
    with torch.device("meta"):
        layer = nn.Linear(8, 8)
    found = estimate(layer, world=2, strategy="zero3", optimizer="muon").rows[0].optimizer_state
    assert found == 4 * (64 + 2 * 8) / 2 + 4  # AdamW counts steps in a tensor


def test_json_has_every_figure(tmp_path: Path) -> None:
    found = estimate(on_meta(depth=2), world=4, strategy=["zero2", "zero3"], batch=BATCH, memory="1GB")
    read = json.loads(found.to_json())
    assert [(row["strategy"], row["checkpointing"]) for row in read["rows"]] == [
        ("zero2", False), ("zero2", True), ("zero3", False), ("zero3", True),
    ]  # fmt: skip
    for line, row in zip(read["rows"], found.rows, strict=True):
        assert line["peak"] == row.peak.num_bytes == max(peak["bytes"] for peak in line["peaks"].values())
        for peak in line["peaks"].values():
            assert sum(peak["by_kind"].values()) == peak["bytes"]
        assert line["activations"] > 0
    assert read["memory"] == 10**9


def test_a_model_without_blocks_has_no_row_with_checkpointing() -> None:
    assert [
        row.is_checkpointed
        for row in estimate(nn.Linear(8, 8), world=2, strategy="ddp", batch="4x8:fp32").rows
    ] == [False]
    with pytest.raises(ValueError, match="activation_checkpointing=True chooses no module inside the Linear"):
        estimate(nn.Linear(8, 8), world=2, strategy="ddp", batch="4x8:fp32", activation_checkpointing=True)


@pytest.mark.parametrize(("world", "blocks"), [(2, 2), (1, 1)], ids=["two ranks", "a rank that is alone"])
def test_on_a_gpu_groups_too_small_for_parts_are_held_until_they_are_reduced(world: int, blocks: int) -> None:
    """While a block's gradients arrive, those of the block behind it are in flight, if there is another rank."""

    class Block(nn.Sequential):
        pass

    with torch.device("meta"):
        wide, narrow = (partial(nn.Linear, *sizes, bias=False) for sizes in ((512, 2048), (2048, 512)))
        model = nn.Sequential(*(Block(wide(), nn.Tanh(), narrow()) for _ in range(4)))
    (row,) = estimate(model, **(PLAIN | {"world": world}), wrap=Block, device="cuda").rows
    assert row.peaks["backward"].by_kind["unsharded gradients"] == blocks * (2 * 512 * 2048 * 4)


def test_checkpointing_keeps_less_of_activations() -> None:
    without, with_it = estimate(on_meta(depth=6), world=4, strategy="zero3", batch=torch.empty(999, 512)).rows
    assert (without.is_checkpointed, with_it.is_checkpointed) == (False, True)
    assert without.activations is not None
    assert with_it.activations is not None
    assert with_it.activations < 0.5 * without.activations
    assert with_it.sent == without.sent


def test_offloading_leaves_inputs_of_two_blocks_on_the_device() -> None:
    rows, width, depth = 999, 512, 6
    arguments: dict[str, Any] = {"world": 4, "strategy": "zero3", "batch": torch.empty(rows, width)}
    kept, moved = (
        estimate(on_meta(depth=depth), activation_checkpointing=True, activation_offloading=on, **arguments)
        for on in (False, True)
    )
    num_bytes = 4 * rows * width
    forwards = [found.rows[0].peaks["forward"].num_bytes for found in (kept, moved)]
    assert forwards[0] - forwards[1] == (depth - 2) * num_bytes
    assert not kept.rows[0].offloads_activations
    assert moved.rows[0].offloads_activations
    assert "offloaded" in str(moved)
    # Beside rows that keep everything, without being asked for checkpointing.
    both = estimate(on_meta(depth=depth), activation_offloading=True, **arguments).rows
    assert [row.as_dict()["activations_offloaded"] for row in both] == [False, True]
    assert both[1].peaks == moved.rows[0].peaks


@pytest.mark.parametrize(("memory", "shown"), [("45MB", "45.00 MB"), ("80GB", "80.00 GB")])
def test_the_picture_says_what_it_is_of_and_its_labels_stay_inside(memory: str, shown: str) -> None:
    """A line at the memory of a rank would leave no room for the rest where most of it is free."""
    model = on_meta(depth=1)
    found = estimate(model, world=4, strategy=["zero2", "zero3"], optimizer="sgd", memory=memory)
    figure = figure_of(found)
    assert figure.get_suptitle() == found.model == "Tower, 4 ranks, no batch"
    figure.canvas.draw()
    for axes in figure.axes:
        texts = {text.get_text().strip(): text for text in axes.texts}
        assert list(texts) == ["forward", "backward", "optimizer", f"memory of a rank: {shown}"]
        frame = axes.get_window_extent()
        for text in texts.values():
            assert frame.x0 <= text.get_window_extent().x0 < text.get_window_extent().x1 <= frame.x1
        lines = [line.get_ydata()[0] for line in axes.lines if line.get_color() == "red"]
        assert lines == ([texts[f"memory of a rank: {shown}"].get_position()[1]] if memory == "45MB" else [])
        highest = max(row.peak.num_bytes for row in found.rows) / 1e6
        assert highest < axes.get_ylim()[1] < 2.5 * highest


def test_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate(on_meta(depth=1), world=4, strategy=["zero2", "zero3"], memory="1GB")
    found.picture(tmp_path / "estimate.png")
    assert (tmp_path / "estimate.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.delitem(sys.modules, "shardwise.planning.picture")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r"import of matplotlib.figure halted.*pip install 'shardwise\[pictures\]'"
    ):
        found.picture(tmp_path / "none.png")


# --- what is left behind --------------------------------------------------------------------------


def what_there_is(model: nn.Module) -> list[Any]:
    world = dist.distributed_c10d._world
    return [
        *(dist.is_initialized(), world, dict(world.pg_map), world.group_count, dict(os.environ)),
        *(type(module) for module in model.modules()),
        *((name, id(p), p.device, p._version, dict(vars(p))) for name, p in model.named_parameters()),
        *(sorted(vars(module)) for module in model.modules()),
    ]


def test_nothing_is_left_behind() -> None:
    model = Tower(width=512, hidden=1024)  # on the host, with values
    before, values = what_there_is(model), [p.detach().clone() for p in model.parameters()]
    estimate(model, world=(2, 4), strategy=["zero1", "hybrid"], batch=BATCH, activation_checkpointing=True)
    with pytest.raises(ValueError, match="failed on tensors like the batch"):
        estimate(model, world=8, batch="3")
    assert what_there_is(model) == before
    assert all(map(torch.equal, values, model.parameters()))


def peaks_of(model: nn.Module) -> list[int]:
    found = estimate(model, world=(2, 4), strategy=["ddp", "hybrid"], device="cpu")
    return [row.peak.num_bytes for row in found.rows]


@on_ranks(2)
def test_a_job_that_runs_goes_on() -> None:
    alone = peaks_of(Tower(width=64))
    model = Tower(width=64)
    before = what_there_is(model)
    peaks = peaks_of(model)
    assert what_there_is(model) == before
    total = torch.ones(3)
    dist.all_reduce(total)
    shardwise.shard_model(model, strategy="zero3")(torch.ones(2, 64)).sum().backward()
    assert [peaks, total.tolist()] == [alone, [2.0] * 3]


@on_ranks(2)
def test_other_threads_see_their_own_process_groups() -> None:
    with ThreadPoolExecutor(1) as pool:
        with fake_world({"shard": 7}, lambda *_: None):
            sizes = [dist.get_world_size(), pool.submit(dist.get_world_size).result()]
        assert [*sizes, dist.get_world_size()] == [7, 2, 2]


def full_values(mesh: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = shardwise.fully_shard(nn.Linear(5, 3), mesh=mesh)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("first", ["job", "dry run"])
@on_ranks(2)
def test_a_dry_run_and_a_job_may_have_equal_meshes(first: str) -> None:
    """On an equal mesh: DTensor takes it for the same."""
    torch.manual_seed(0)
    expected = nn.Linear(5, 3).state_dict()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    found = [full_values(mesh)] if first == "job" else []
    sent: list[int] = []
    with fake_world({"shard": 2}, lambda dimension, num_bytes, tensors: sent.append(num_bytes)) as own:
        full_values(own)
    assert len(sent) == 2, "all-gathers of the dry run went elsewhere"
    for values in [*found, full_values(mesh)]:
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_names_of_process_groups_are_free_again() -> None:
    with fake_world({"replicate": 2, "shard": 3}, lambda *_: None) as mesh:
        names = [mesh.get_group(dim).group_name for dim in (0, 1)]
    for name in names:
        with pytest.raises(RuntimeError, match="Could not resolve"):
            torch._C._distributed_c10d._resolve_process_group(name)
    assert not dist.is_initialized()
    assert c10d.is_fake is not None


# --- shards in host memory ------------------------------------------------------------------------


def test_what_is_offloaded_is_in_no_peak_of_the_device() -> None:
    """But copies for two groups, and reduced gradients of three; tests/software_gpu compares with an allocator."""
    (kept,) = estimate(on_meta(), **PLAIN).rows
    found = estimate(on_meta(), offload_policy="cpu", **PLAIN)
    (moved,) = found.rows
    assert (moved.parameters, moved.gradients, moved.optimizer_state) == (
        kept.parameters,
        kept.gradients,
        kept.optimizer_state,
    )
    group = kept.step.largest_shards
    assert 0 < group < kept.parameters
    for phase, copied_back in (("forward", 0), ("backward", 3 * group)):
        begin, end = kept.step.phase(phase)
        highest = max(
            moment.num_bytes - sum(moment.by_kind[kind] for kind in (PARAMETERS, GRADIENTS, STATE))
            for moment in kept.step.timeline
            if begin <= moment.time < end
        )
        assert highest + 2 * group <= moved.peaks[phase].num_bytes <= highest + 2 * group + copied_back
    assert moved.peaks["backward"].num_bytes > highest + 2 * group, "no reduced gradients"
    assert str(found).splitlines()[0].endswith("parameters, gradients and state are in host memory")


def test_whole_parameters_are_on_the_device_while_they_are_used() -> None:
    (row,) = estimate(on_meta(depth=1), offload_policy="cpu", **PLAIN | {"strategy": "ddp"}).rows
    assert row.peaks["forward"].num_bytes > row.parameters


def test_progress_is_told_before_each_run_and_at_the_end() -> None:
    told: list[tuple[int, int, str]] = []
    estimate(on_meta(depth=1), world=2, strategy=["ddp", "zero3"], progress=lambda *each: told.append(each))
    assert told == [(0, 2, "ddp"), (1, 2, "zero3"), (2, 2, "")]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 0}, "world is 0; pass a number of ranks"),
        ({"world": "8x"}, "world is '8x'"),
        ({"world": 8, "strategy": "zero4"}, "there is no strategy 'zero4'. Pass one of ddp, zero1"),
        (
            {"world": 16, "strategy": "hybrid"},
            r"Pass both, world=\(hosts, ranks_per_host\), such as \(2, 8\)",
        ),
        (
            {"world": 8, "optimizer": "adamv"},
            "estimate: there is no optimizer 'adamv'. Pass one of adamw, adam",
        ),
        ({"world": 8, "offload_policy": "cpu", "device": "cpu"}, "Leave one of them out"),
        ({"world": 8, "memory": "80 GBs"}, "memory '80 GBs' is not an amount of memory"),
        ({"world": 8, "bandwidth": "5GB/s"}, "bandwidth needs the speed of the device and a batch"),
        ({"world": 8, "batch": BATCH, "flops": "h99", "bandwidth": 1}, "flops is 'h99'"),
        (
            {"world": 8, "batch": BATCH, "flops": 1e12, "bandwidth": "x"},
            "bandwidth is 'x'; pass bytes a second",
        ),
        (
            {"world": "2x4", "batch": BATCH, "flops": 1.0, "bandwidth": {"shard": 1}, "strategy": "hybrid"},
            "bandwidth names shard, and not replicate",
        ),
        ({"world": 8, "batch": BATCH, "flops": 1e12, "bandwidth": "400Gb/s"}, "400 Gb/s is 50GB/s"),
        ({"world": 8, "largest_batch": True}, "largest_batch needs memory"),
        ({"world": 8, "device": "tpu"}, "pass 'cuda' or 'cpu'"),
        ({"world": 8, "batch": "8xx"}, "batch '8xx' is not understood"),
        (
            {"world": 8, "batch": "8x100:fp32"},
            r"forward of the Tower failed on tensors like the batch, float32 \(8, 100\): RuntimeError",
        ),
        ({"world": 8, "batch": (8, 512)}, r"the batch, which has no tensors: pass torch.empty\(8, 64\) or"),
        (
            {"world": 8, "batch": "8x512:fp32", "loss": lambda output: output.nope},
            r"estimate: loss\(\) on the output of the Tower failed on.*: AttributeError",
        ),
        ({"world": 8, "activation_checkpointing": True}, "activation_checkpointing needs a batch"),
        ({"world": 8, "activation_offloading": True}, "activation_offloading needs"),
        (
            {"world": 8, "batch": BATCH, "activation_offloading": True, "activation_checkpointing": False},
            "activation_offloading needs activation checkpointing",
        ),
        ({"world": 8, "batch": BATCH, "activation_offloading": True, "device": "cpu"}, 'device="cuda"'),
        (
            {"world": 8, "batch": BATCH, "activation_offloading": True, "compile": {"backend": "eager"}},
            "not work with compile",
        ),
        ({"world": 8, "compile": {"backend": "nothing"}}, "torch.compile refuses compile="),
        ({"world": 8, "strategy": []}, "strategy is empty"),
        (
            {"world": 8, "batch": BATCH, "loss": lambda output: output},
            r"it returned a tensor of shape \(16, 1\), not a scalar",
        ),
        ({"world": 8, "batch": BATCH, "loss": lambda _: 1.0}, "it returned float, not a scalar"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(on_meta(depth=1), **options)


def test_bad_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"estimate: model is 'model', a str; pass an nn.Module"):
        estimate("model", world=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer is 3, an int; pass a name"):
        estimate(on_meta(), world=8, optimizer=3)
    with pytest.raises(TypeError, match=r"memory is 1.5, a float"):
        estimate(on_meta(), world=8, memory=1.5)  # type: ignore[arg-type]
    model = on_meta()
    model.lock = __import__("threading").Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"The Tower cannot be copied \(TypeError: cannot pickle"):
        estimate(model, world=8)


def test_the_callers_modes_do_not_matter() -> None:
    model = on_meta(depth=1)
    plain = estimate(model, **PLAIN)
    with torch.no_grad(), torch.device("meta"):
        found = estimate(model, **PLAIN)
    assert found.to_json() == plain.to_json()
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        estimate(model.requires_grad_(False), world=4)


def test_a_model_of_tokens_with_tied_weights_and_buffers() -> None:
    with torch.device("meta"):
        model = LanguageModel(vocabulary=64, width=32)
    model.head.weight = model.embed.weight
    model.register_buffer("table", torch.zeros(1000, 1000, device="meta"))
    (row,) = estimate(model, **PLAIN | {"batch": "2x9"}).rows
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert row.parameters == pytest.approx(whole / 2, rel=0.02)
    assert row.peak.by_kind["buffers and batch"] >= 4_000_000
