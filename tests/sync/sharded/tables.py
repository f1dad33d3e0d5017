"""A model with a sharded table, and the same one with torch's own, trained as tests of tables are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.data.sharding import step_size
from elastic_ray.sync import ShardedEmbedding
from tests.sync.tables import ROWS, SAMPLES, WIDTH, data

EPOCHS, BATCH = 2, 7


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    optimizer: str = "sgd"
    mode: str | None = None
    padding: int | None = None
    copies: int = 2
    rule: Any = None

    def weight(self) -> Tensor:
        """Of the table, at the beginning."""
        weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        if self.padding is not None:
            weight[self.padding] = 0.0
        return weight

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of dense parameters; of all for torch's own tables."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.3)
        return torch.optim.Adagrad(model.parameters(), lr=0.1)

    def sharded(self) -> Model:
        """With a table whose rows live with owners."""
        table = ShardedEmbedding(
            ROWS, WIDTH, self.padding, mode=self.mode, copies=self.copies, optimizer=self.rule, seed=5
        )
        model = Model(table, self.mode)
        model.table.load_state_dict({"weight": self.weight()})
        return model

    def plain(self) -> Model:
        """With torch's own."""
        options = {"padding_idx": self.padding, "_weight": self.weight()}
        if self.mode is None:
            return Model(nn.Embedding(ROWS, WIDTH, **options), None)
        return Model(nn.EmbeddingBag(ROWS, WIDTH, mode=self.mode, **options), self.mode)


class Model(nn.Module):
    """A table, used twice, and a layer."""

    def __init__(self, table: nn.Module, mode: str | None) -> None:
        super().__init__()
        self.table, self.mode = table, mode
        generator = torch.Generator().manual_seed(2)
        self.net = nn.Linear(WIDTH, 3)
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        if self.mode is not None:
            return self.net(torch.tanh(self.table(ids)))
        return self.net(torch.tanh(self.table(ids[:, :2]).sum(1) + 0.5 * self.table(ids[:, 2])))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """All, whole on rank 0; every rank calls it."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def elastic(case: Case, micro: int | None = None, batch: int = BATCH) -> dict[str, Tensor]:
    """Train with owners; `micro`: most samples a rank takes at once."""
    model = case.sharded()
    optimizer = case.make(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(data(), batch_size=batch, seed=3)
    if micro is not None:
        loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(EPOCHS):
        for ids, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(ids), classes).backward()
            optimizer.step()
    return parameters(model)


def by_torch(case: Case, world: int = 1, batch: int = BATCH, epochs: int = EPOCHS) -> dict[str, Tensor]:
    """Train whole batches in one process by torch alone, but for the order of samples and short tails."""
    model = case.plain()
    optimizer = case.make(model)
    for epoch in range(epochs):
        order = IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]
        position = 0
        while count := step_size(position=position, total=SAMPLES, batch_size=batch, world_size=world):
            ids, classes = data()[torch.from_numpy(order[position : position + count])]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids), classes).backward()
            optimizer.step()
            position += count
    return parameters(model)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 1e-5) -> None:
    """Up to rounding."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
