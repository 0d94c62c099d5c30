"""Encoder-decoder models that generate, and embeddings that write to their weights in forward."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import WIDTH, Block, built
from on_ranks import on_ranks
from scenario import Side, same_as_plain
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import fully_shard, inference


class EncoderDecoder(nn.Module):
    """As T5: one embedding for both halves and the head; `generate` calls the encoder first."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(16, WIDTH)
        self.encoder, self.decoder = (nn.ModuleList(Block(WIDTH, 13) for _ in range(2)) for _ in range(2))

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.shared(tokens)
        for block in self.encoder:
            x = block(x)
        return x.mean(1, keepdim=True)

    def forward(self, tokens: Tensor, encoded: Tensor) -> Tensor:
        x = self.shared(tokens) + encoded
        for block in self.decoder:
            x = block(x)
        return x @ self.shared.weight.T

    def generate(self, tokens: Tensor) -> Tensor:
        encoded = self.encode(tokens)
        made = tokens[:, :1]
        for _ in range(3):
            made = torch.cat([made, self(made, encoded)[:, -1:].argmax(-1)], dim=1)
        return made


@same_as_plain(2)
def test_a_method_that_begins_with_a_part_of_the_model_finds_full_parameters(side: Side) -> None:
    torch.manual_seed(2)
    model: Any = EncoderDecoder()
    side.shard(*model.encoder, *model.decoder, model)
    tokens = torch.arange(24).view(4, 6) % 16
    if not side.is_sharded:
        with torch.no_grad():
            side.note("tokens", model.generate(tokens))
            side.note("encoded", model.encode(tokens))
        return
    with inference(model):
        side.note("tokens", model.generate(tokens))
        side.note("encoded", model.encode(tokens))
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert type(model.shared.weight) is nn.Parameter
    side.assert_settled(model)


# --- max_norm -------------------------------------------------------------------------------------


@same_as_plain(2)
def test_max_norm_is_allowed_where_renormalising_again_changes_nothing(side: Side) -> None:
    embedding = built(nn.Embedding, 16, WIDTH, max_norm=1.0, seed=3)
    embedding.weight.requires_grad_(False)
    model = nn.Sequential(embedding, nn.Linear(WIDTH, 3).double())
    side.shard(model[0], model, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        tokens = side.part(torch.arange(12) + step) % 16
        loss = model(tokens).pow(2).mean()
        loss.backward()
        side.note_mean("loss", loss)
        side.note("gradient", model[1].weight.grad)
        optimizer.step()
    with torch.no_grad():
        side.note_rows("evaluation", model(side.part(torch.arange(12))))


@on_ranks(2)
def test_training_an_embedding_that_renormalises_itself_is_refused() -> None:
    model = fully_shard(nn.Sequential(nn.Embedding(16, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 3)))
    with pytest.raises(RuntimeError) as caught:
        model(torch.arange(4)).sum().backward()
    assert_expected_inline(
        str(caught.value),
        """0.weight: changed in place while unsharded (group 'Sequential'). Inside forward a module sees an unsharded copy, which is now freed, so the change would be lost. nn.Embedding(max_norm=...) renormalises rows of its weight in each forward: set max_norm to None and renormalise the shard after each optimizer step, under torch.no_grad(); or freeze it.""",
    )
