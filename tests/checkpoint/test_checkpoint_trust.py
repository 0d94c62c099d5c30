"""Checkpoints from anywhere: loading them runs nothing and reads nothing that is not theirs, unless they are trusted."""

import contextlib
import enum
import io
import json
import os
import pickle
import random
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import KeepsExtra, rewritten
from comparing import alike
from expecttest import assert_expected_inline
from harness import World
from meshed import refusal
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardwise import fully_shard, load_checkpoint, load_full_state_dict, save_checkpoint
from shardwise.checkpoint.metadata_file import read_metadata
from shardwise.state import save_safetensors


class Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class ByCopyreg(Attack):
    """Calls through a function of Python's own."""

    def __reduce__(self) -> Any:
        return eval, (f"__import__('pathlib').Path({str(self.marker)!r}).touch()",)


class Setter:
    """Would set an attribute of torch's class, for all that comes after."""

    def __reduce__(self) -> Any:
        return MetadataIndex, ("x",), (None, {"__hash__": torch.Size})


def saved(path: Path) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that there is no process group
        dcp.save({"model": nn.Linear(4, 4).state_dict(), "step": 3}, checkpoint_id=path, no_dist=True)


def refused(path: Path, **options: Any) -> str:
    model = nn.Linear(4, 4)
    before = model.weight.clone()
    text = refusal(load_checkpoint, path, model, **options)
    assert torch.equal(model.weight, before)
    return text.replace(str(path.parent), "RUN")


@pytest.mark.parametrize("kind", [Attack, ByCopyreg])
@pytest.mark.parametrize("where", ["whole", "storage_meta", "key", "planner_data", "sizes"])
def test_an_index_runs_nothing(tmp_path: Path, kind: Any, where: str) -> None:
    path, attack = tmp_path / "x", kind(tmp_path / "marker")
    saved(path)

    def edit(index: Metadata) -> Any:
        if where == "whole":
            return attack
        if where == "key":
            index.state_dict_metadata[attack] = index.state_dict_metadata["model.weight"]
        elif where == "sizes":
            index.state_dict_metadata["model.weight"].chunks[0].sizes = attack
        else:
            setattr(index, where, attack)
        return index

    rewritten(path, edit)
    text = refused(path)
    assert not (tmp_path / "marker").exists()
    assert "RUN/x/.metadata is not read: it asks for " in text
    assert "pass trust=True" in text
    with contextlib.suppress(ValueError, TypeError):  # what the attack leaves is no index, in most places
        load_checkpoint(path, nn.Linear(4, 4), trust=True)
    assert (tmp_path / "marker").exists(), "the attack is none"


def test_an_index_changes_no_class(tmp_path: Path) -> None:
    before = MetadataIndex.__hash__
    with pytest.raises(TypeError, match="MetadataIndex"):
        read_metadata(pickle.dumps(Setter()))
    content = (
        b"\x80\x04c" + b"torch.distributed.checkpoint.metadata\nMetadataIndex\n"
        b"N}X\x08\x00\x00\x00__hash__K\x01s\x86b."  # BUILD, on the class itself
    )
    with pytest.raises((TypeError, AttributeError)):
        read_metadata(content)
    assert MetadataIndex.__hash__ is before


class ByNames(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


class OfSize:
    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "numel")


def test_an_index_may_name_members_of_enumerations_but_no_other_attributes(tmp_path: Path) -> None:
    saved(tmp_path / "x")
    content = (tmp_path / "x" / ".metadata").read_bytes()
    by_names = io.BytesIO()
    ByNames(by_names).dump(pickle.loads(content))
    assert b"TORCH_CONTIGUOUS_FORMAT" in by_names.getvalue()
    assert read_metadata(by_names.getvalue()) == read_metadata(content)
    with pytest.raises(ValueError, match="it asks for an attribute"):
        read_metadata(pickle.dumps(OfSize()))


OUTSIDE = ["../secret.distcp", "a/../../secret.distcp", "/etc/hostname", "C:\\secret", "..\\secret", ""]


@pytest.mark.parametrize("name", OUTSIDE)
def test_files_outside_of_the_folder_are_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x"
    saved(path)
    (path / "__0_0.distcp").rename(tmp_path / "secret.distcp")

    def edit(index: Metadata) -> None:
        for record in index.storage_data.values():
            record.relative_path = name

    rewritten(path, edit)
    for options in ({}, {"verify": False}, {"trust": True}):
        text = refused(path, **options)
        assert f"RUN/x/.metadata names files outside of its folder: {name!r}." in text


@pytest.mark.parametrize("name", OUTSIDE)
def test_files_outside_of_a_safetensors_folder_are_not_read(tmp_path: Path, name: str) -> None:
    path, model = tmp_path / "x", nn.Linear(4, 4)
    save_safetensors(model, path)
    (path / "model.safetensors").rename(tmp_path / "secret.distcp")
    index = {"weight_map": {"weight": name, "bias": name}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refusal(load_full_state_dict, model, path)
    assert f"model.safetensors.index.json names files outside of its folder: {name!r}." in text


def test_links_that_somebody_put_into_the_folder_are_followed(tmp_path: Path) -> None:
    """As Hugging Face's cache has them."""
    path, model, other = tmp_path / "x", nn.Linear(4, 4), nn.Linear(4, 4)
    save_safetensors(model, path)
    (path / "model.safetensors").rename(tmp_path / "blob")
    (path / "model.safetensors").symlink_to("../blob")
    load_full_state_dict(other, path)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("what", ["offset", "length", "sizes", "relative_path"])
def test_an_index_of_other_types_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    saved(path)

    def edit(index: Metadata) -> None:
        if what == "sizes":
            index.state_dict_metadata["model.weight"].chunks[0].sizes = ["4", None]
        else:
            setattr(next(iter(index.storage_data.values())), what, ("1",))

    rewritten(path, edit)
    assert re.search("ValueError: RUN/x(/.metadata)? (is damaged|cannot be read)", refused(path))


def objects(folder: str) -> list[str]:
    """Attacks in each place where a checkpoint has objects, loaded on all ranks."""
    rank, found = dist.get_rank(), []
    for where in ("shared", "per_rank", "extra_state"):
        path, marker = f"{folder}/{where}", Path(f"{folder}/{where}-marker-{rank}")
        model = fully_shard(KeepsExtra(Path("of the module")) if where == "extra_state" else nn.Linear(4, 4))
        extras = {} if where == "extra_state" else {where: {"it": Attack(marker)}}
        with pytest.warns(UserWarning, match=r"only be loaded with trust=True"):
            save_checkpoint(path, model, **extras)
        before = model.weight.full_tensor().clone()
        with torch.no_grad():
            model.weight.mul_(2)
        found.append(refusal(load_checkpoint, path, model).replace(folder, "RUN"))
        assert torch.equal(model.weight.full_tensor(), 2 * before)
        assert not marker.exists()
        dist.barrier()
        load_checkpoint(path, model, trust=True)
        assert torch.equal(model.weight.full_tensor(), before)
        if where == "extra_state":
            assert model.state == Path("of the module")
        else:
            assert marker.exists() or where == "shared"
    with torch.serialization.safe_globals([type(Path())]):  # torch's own way to name what is harmless
        load_checkpoint(f"{folder}/extra_state", model)
    found.append(refusal(load_checkpoint, path, model, trust=bool(rank)))
    return found


def test_objects_are_made_only_where_they_are_trusted(world2: World, tmp_path: Path) -> None:
    assert_expected_inline(
        "\n".join(alike(world2.run(objects, str(tmp_path)))).replace(
            "pathlib._local.", "pathlib."
        ),  # its home in Python 3.13
        """\
ValueError: RUN/shared: shared.it holds objects of posix.system. Making such an object can run any code, so only tensors and plain values are read. If you trust whoever wrote it, pass trust=True, or name the classes in torch.serialization.add_safe_globals. Nothing was loaded.
ValueError: rank 0: RUN/per_rank: per_rank.0.it holds objects of posix.system. Making such an object can run any code, so only tensors and plain values are read. If you trust whoever wrote it, pass trust=True, or name the classes in torch.serialization.add_safe_globals. Nothing was loaded. (ranks 0, 1 failed)
ValueError: RUN/extra_state: model._extra_state holds objects of pathlib.PosixPath. Making such an object can run any code, so only tensors and plain values are read. If you trust whoever wrote it, pass trust=True, or name the classes in torch.serialization.add_safe_globals. Nothing was loaded.
ValueError: load_checkpoint: ranks disagree on trust: rank 0 has False, rank 1 has True. Pass the same on all ranks.""",
    )


# --- told when it is saved ------------------------------------------------------------------------


def plain_values() -> dict[str, Any]:
    return {
        "numpy": np.random.default_rng().bit_generator.state,
        "python": random.getstate(),
        "torch": [torch.get_rng_state()],
        "others": (torch.float32, torch.Size([2]), OrderedDict(a={1: {b"x"}}), 1j, None),
    }


def test_what_needs_trust_is_named_when_it_is_saved(tmp_path: Path) -> None:
    path, model = tmp_path / "x", nn.Sequential(KeepsExtra(Path("of the module")), nn.Linear(2, 2))
    shared = plain_values() | {"array": {"mean": [np.zeros(2)]}}
    with pytest.warns(UserWarning, match="save_checkpoint") as caught:
        save_checkpoint(path, model, shared=shared, per_rank={"numpy": np.random.get_state()})
    (told,) = [each for each in caught if "trust=True" in str(each.message)]
    places = re.findall(r"(\S+) \((\w+)", str(told.message))
    assert places == [
        ("model.0._extra_state", "pathlib"),
        ("shared.array", "numpy"),
        ("per_rank.0.numpy", "numpy"),
    ]
    assert told.filename == __file__
    assert "trust=True" in refusal(load_checkpoint, path, model)
    loaded = load_checkpoint(path, model, trust=True)
    assert loaded.per_rank is not None
    np.random.set_state(loaded.per_rank["numpy"])


def test_nothing_is_said_of_what_is_read_without_trust(tmp_path: Path) -> None:
    values, model = plain_values(), nn.Linear(2, 2)
    save_checkpoint(tmp_path / "x", model, shared=values, per_rank=values)
    loaded = load_checkpoint(tmp_path / "x", model)
    assert repr(loaded.shared) == repr(loaded.per_rank) == repr(values)


@on_ranks(2)
def test_a_warning_of_one_rank_that_is_an_error_is_one_on_all(tmp_path: Path) -> None:
    values = {"numpy": np.zeros(1)} if dist.get_rank() == 1 else {}
    told = refusal(save_checkpoint, str(tmp_path / "x"), fully_shard(nn.Linear(2, 2)), per_rank=values)
    assert "rank 1: UserWarning: save_checkpoint: per_rank.1.numpy (" in told
