"""torchtitan's recipe for decoders shards with this library, and its own scale of gradients holds.

The recipe turns the division of gradients off, in modules that it knows by ``isinstance``. torchtitan's models
need a GPU to be imported; the decoder here has their attributes. The peer has no such reduction on gloo.
"""

import warnings
from typing import Any

import pytest
import torch
from harness import World
from reference import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import interop

pytest.importorskip("torchtitan")
pytest.importorskip("spmd_types")

WIDTH, VOCABULARY, RANKS = 8, 11, 2


class Decoder(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.enable_weight_tying = is_tied
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
                for i in range(2)
            }
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def trained(is_sharded: bool, is_tied: bool) -> dict[str, Any]:
    """Two steps on sums of losses: torchtitan divides by the tokens of all ranks itself."""
    torch.manual_seed(0)
    model = Decoder(is_tied).double()
    rows = slice(None)
    if is_sharded:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        with interop.installed():
            apply_fsdp_to_decoder(model, mesh, torch.float64, torch.float64, pp_enabled=False)
        rank = torch.distributed.get_rank()
        rows = slice(2 * rank, 2 * rank + 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens = torch.randint(VOCABULARY, (2 * RANKS, 6), generator=torch.Generator().manual_seed(step))[
            rows
        ]
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        (loss / (2 * RANKS * 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "ours": [isinstance(each, shardwise.FSDPModule) for each in (model, *model.layers.values())],
        "weights": {name: full(param) for name, param in model.named_parameters()},
    }


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_its_recipe_for_decoders_trains_as_one_process_does(world2: World, is_tied: bool) -> None:
    expected = trained(is_sharded=False, is_tied=is_tied)["weights"]
    for found in world2.run(trained, is_sharded=True, is_tied=is_tied):
        assert found["ours"] == [True] * 3
        for name, value in expected.items():
            torch.testing.assert_close(found["weights"][name], value)
