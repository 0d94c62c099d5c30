"""A loss of sentence-transformers that runs its backward passes inside of one trains on our shards as in one process."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("sentence_transformers")
pytest.importorskip("transformers")

from launch import run_job
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_models import NORM, RANKS, VOCABULARY, assert_same, mean_of_ranks, texts, tokenizer, whole
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from shardwise import shard_model

STEPS, PAIRS, MINIBATCH = 3, 3, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a BERT and its tokenizer."""
    path = tmp_path_factory.mktemp("sentences")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=VOCABULARY - 2,
    )
    BertModel(config).save_pretrained(path / "bert")
    tokenizer().save_pretrained(path / "bert")
    return path


def sentence_model(folder: Path) -> SentenceTransformer:
    bert = Transformer(str(folder / "bert"))
    pooling = Pooling(bert.get_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(modules=[bert, pooling], device="cpu").double()


def train(model: SentenceTransformer) -> dict[str, Any]:
    """Each question against the answers of all ranks."""
    loss_of = CachedMultipleNegativesRankingLoss(model, mini_batch_size=MINIBATCH, gather_across_devices=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        pairs = [list(islice(texts(2 * step + column), RANKS * PAIRS)) for column in range(2)]
        loss = loss_of([model.preprocess(own(column)) for column in pairs], None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of_ranks(loss))
    return {"losses": torch.stack(losses), "weights": whole(model)}


def own(column: list[str]) -> list[str]:
    if not dist.is_initialized():
        return column
    return column[dist.get_rank() * PAIRS :][:PAIRS]


def training(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    return train(shard_model(sentence_model(folder), wrap={BertLayer}))


def test_cached_ranking_loss_trains_as_in_one_process(folder: Path) -> None:
    found, expected = run_job(training, folder), train(sentence_model(folder))
    torch.testing.assert_close(found["losses"], expected["losses"])
    assert_same(found["weights"], expected["weights"])
