"""``resume``: the newest checkpoint, the same on all ranks, or none."""

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from checkpointing import train_tower
from comparing import assert_equal
from expecttest import assert_expected_inline
from harness import World
from meshed import parameters_of, refusal
from models import built, shard_tower, uneven_tower
from on_ranks import on_ranks
from reference import adamw
from torch import nn

from shardwise import latest_checkpoint, resume, save_checkpoint
from shardwise.checkpoint import folders
from shardwise.state import EMA


def job(folder: str, last_step: int) -> Any:
    model = built(uneven_tower)
    shard_tower(model)
    optimizer, ema = adamw(model), EMA(model)
    loaded = resume(folder, model, optimizer, states={"ema": ema})
    for step in range(loaded.step, last_step):
        train_tower(model, optimizer, range(step, step + 1))
        ema.update()
        if step % 2 == 1:
            shared = {"step": step + 1, "seen": 12 * (step + 1)}
            save_checkpoint(f"{folder}/step-{step + 1}", model, optimizer, states={"ema": ema}, shared=shared)
    found = loaded.path and loaded.path.name, loaded.step, loaded.shared.get("seen"), ema.num_updates
    return found, parameters_of(model)


def test_a_job_that_is_started_again_goes_on(world2: World, world3: World, tmp_path: Path) -> None:
    plain = built(uneven_tower)
    train_tower(plain, adamw(plain), range(14))
    for found, _ in world2.run(job, str(tmp_path / "run"), 12):
        assert found == (None, 0, None, 12)
    for found, weights in world3.run(job, str(tmp_path / "run"), 14):
        assert found == ("step-12", 12, 144, 14)
        assert_equal(weights, parameters_of(plain), atol=1e-10)


@on_ranks(2)
def test_a_save_beside_training_is_over_before(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model = built(uneven_tower)
    shard_tower(model)
    save_checkpoint(f"{folder}/step-1", model, shared={"step": 1}, asynchronous=True)
    loaded = resume(folder, model)
    assert (loaded.step, latest_checkpoint(folder) == loaded.path) == (1, True)


@on_ranks(3)
def test_only_the_first_rank_looks(tmp_path: Path) -> None:
    """Hosts may see old states of a file system that they share."""
    folder = str(tmp_path)
    model = built(uneven_tower)
    shard_tower(model)
    save_checkpoint(f"{folder}/step-1", model, shared={"step": 1})
    with mock.patch.object(folders, "complete_in", wraps=folders.complete_in) as complete:
        step = resume(folder, model).step
    assert (complete.call_count, step) == [(1, 1), (0, 1), (0, 1)][dist.get_rank()]


@on_ranks(2)
def test_the_first_rank_logs_what_was_found(tmp_path: Path) -> None:
    folder = str(tmp_path)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage().replace(folder, "RUN"))  # type: ignore[method-assign]
    logger = logging.getLogger("shardwise.checkpoint.load")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        resume(folder, nn.Linear(2, 2))
        save_checkpoint(f"{folder}/step-1", nn.Linear(2, 2))
        resume(folder, nn.Linear(2, 2))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert records == ([] if dist.get_rank() else ["resume: no checkpoint in RUN", "resume: RUN/step-1"])


# --- bad input ------------------------------------------------------------------------------------


def test_the_step_has_to_be_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-1", nn.Linear(2, 2), shared={"epoch": 3})
    loaded = resume(tmp_path, nn.Linear(2, 2))
    assert loaded.shared == {"epoch": 3}
    assert_expected_inline(
        refusal(lambda: loaded.step).replace(str(tmp_path), "RUN"),
        """ValueError: RUN/step-1 does not record the step at which it was saved: `shared` has only epoch. Save it with save_checkpoint(..., shared={'step': step}).""",
    )


@on_ranks(2)
def test_bad_input_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model = nn.Linear(2, 2)
    save_checkpoint(f"{folder}/step-1", model)
    assert_expected_inline(
        "\n".join(
            [
                refusal(resume, f"{folder}/step-1", model).replace(folder, "RUN"),
                refusal(resume, None, model),
                refusal(resume, f"{folder}/nothing", model, states={"ema": 1}),
                refusal(resume, f"{folder}/nothing", model, strict=1),
                refusal(resume, f"{folder}/of-rank-{dist.get_rank()}", model).replace(folder, "RUN"),
                refusal(resume, folder, nn.Linear(3, 2)).replace(folder, "RUN"),
            ]
        ),
        """\
ValueError: resume: RUN/step-1 is itself a checkpoint, not a folder of checkpoints. Pass it to load_checkpoint, or the folder that holds it to resume.
TypeError: resume: directory is None; pass a folder of checkpoints, as a str or a Path.
TypeError: states['ema'] is a int, which has no state_dict() and load_state_dict(). Pass the object itself, not its state; what has no such methods goes into `shared` or `per_rank`.
TypeError: resume: strict is 1, an int; pass True or False.
ValueError: resume: ranks disagree on directory: rank 0 has 'RUN/of-rank-0', rank 1 has 'RUN/of-rank-1'. Pass the same on all ranks.
ValueError: RUN/step-1: weight has shape (2, 2) in the source and (2, 3) in the model.""",
    )
