"""Where training runs if nobody passes a mesh, by how the process group was asked for."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shardwise.layout.mesh import default_device_type


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("gloo", "cpu"),
        ("cpu:gloo", "cpu"),
        ("cuda:gloo", "cuda"),  # who names it means it
        ("cpu:gloo,cuda:gloo", "cuda"),
        ("fake", "cuda"),
    ],
)
def test_gloo_is_for_the_host_unless_the_device_is_named(backend: str, expected: str, has_gpu: None) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    assert default_device_type("a test") == expected
