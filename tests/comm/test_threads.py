"""Ranks as threads of one process: the library keeps no state of the process, and needs no coalesced calls.

torch's multi-threaded process group offers only plain collectives, some of them not even
asynchronous: the fallback path runs here.
"""

import threading

import pytest
import torch
import torch.distributed as dist
from models import language_model, next_token_loss, token_batch, uneven_batch, uneven_tower
from reference import Recipe, assert_same_record, plain_run, shard, train
from thread_ranks import ThreadRanks

RECIPES = {
    "uneven": Recipe(uneven_tower, uneven_batch),
    "text": Recipe(language_model, token_batch, loss=next_token_loss),
}
_building = threading.Lock()


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="2.11 crashes when several threads enter a FakeTensorMode"
)
class RanksAsThreads(ThreadRanks):
    @property
    def world_size(self) -> int:
        return 3

    def _trains_as_plain(self, name: str) -> None:
        recipe = RECIPES[name]
        with _building:  # the threads share one generator of random numbers
            expected = plain_run(recipe)
            model = recipe.model()
        record = train(shard(model, recipe), recipe, dist.get_rank(), dist.get_world_size())
        mean = torch.tensor(record.losses, dtype=torch.float64)
        dist.all_reduce(mean)
        record.losses = (mean / dist.get_world_size()).tolist()
        assert_same_record(record, expected)

    def test_uneven_model(self) -> None:
        self._trains_as_plain("uneven")

    @pytest.mark.slow
    def test_language_model(self) -> None:
        self._trains_as_plain("text")
