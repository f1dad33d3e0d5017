"""``SyncBatchNorm`` over the job's default group: two workers on one GPU train as one process with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from tests.loop.ranks import Ranks

BATCH = 32


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


def trained(kind: str) -> dict[str, Tensor]:
    """What a net with synchronised statistics ends with."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    wrapped = er.AdaptiveDataParallel(net, optimizer, scaling_rule="none")
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(256, 3, 8, 8, generator=generator), torch.randint(4, (256,), generator=generator)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH, shuffle=False)
    for _ in er.remaining_epochs_until(2):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(images.to(kind)), labels.to(kind)).backward()
            optimizer.step()
    return {name: value.cpu() for name, value in net.state_dict().items()}


def test_two_workers_have_the_statistics_of_the_whole_batch(ranks: Ranks, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("torch has SyncBatchNorm on GPUs only")
    alone = ranks.run(trained, "cuda")
    for found in ranks.run(trained, "cuda", world=2):
        for name, value in alone.items():
            torch.testing.assert_close(found[name].float(), value.float(), rtol=1e-3, atol=1e-3)
