"""Models with tables, data for them, and training under Rows and in one process by torch alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.data.sharding import step_size
from elastic_ray.sync import Parallax, Strategy
from elastic_ray.sync.spec import Rows, Rule

SAMPLES, EPOCHS, BATCH, ROWS, WIDTH = 25, 2, 7, 90, 4


class OneTable(nn.Module):
    """A table and a layer."""

    def __init__(self, sparse: bool, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse, **options)
        self.net = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(torch.tanh(self.table(ids).sum(1)))


class Twice(OneTable):
    """The table is used twice in one forward."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.table(ids[:, :1]).sum(1) * torch.tanh(self.table(ids[:, 1:]).sum(1)))


class BySome(OneTable):
    """Another table that only a few samples use, of which a rank may have none, and one that nobody uses."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.rare, self.never = (nn.Embedding(ROWS, WIDTH, sparse=sparse) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        summed = self.table(ids).sum(1)
        some = ids[:, 0] < 12
        if some.any():
            summed = summed + some[:, None].to(summed.dtype) * self.rare(ids).sum(1)
        return self.net(torch.tanh(summed))


class Tied(OneTable):
    """The table is the output layer too: its gradient is dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids).sum(1)))[:, :3]


class Bag(nn.Module):
    """Bags of rows."""

    def __init__(self, sparse: bool, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, **options)
        self.net = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(torch.tanh(self.table(ids)))


class Padded(OneTable):
    """Id 3 has no gradient."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse, padding_idx=3)


class Bounded(OneTable):
    """Rows are shortened when they are looked up."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse, max_norm=1.0)


class Mean(Bag):
    """Mean of a bag."""


class Sum(Bag):
    """Sum of a bag."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse, mode="sum")


class Largest(Bag):
    """The largest of a bag, for which torch has no sparse gradient."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(False, mode="max")


class Double(OneTable):
    """64-bit parameters."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.double()


class Many(OneTable):
    """So small a table that most of its rows are touched."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.table = nn.Embedding(9, WIDTH, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids % 9)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain."""
    return torch.optim.SGD(model.parameters(), lr=0.3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Every step tells on the next."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Of Adam's kind."""
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Steps dense gradients only, and rows that no step has touched as well."""
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def data() -> torch.utils.data.TensorDataset:
    """Ids, some of which come often, and classes."""
    generator = torch.Generator().manual_seed(7)
    ids = (torch.rand(SAMPLES, 3, generator=generator) ** 2 * ROWS).long()
    return torch.utils.data.TensorDataset(ids, torch.randint(3, (SAMPLES,), generator=generator))


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    build: Callable[[bool], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    sparse: bool
    update: str = "auto"

    def model(self, *, sparse: bool) -> nn.Module:
        """The same each time."""
        torch.manual_seed(1)
        return self.build(sparse)

    @property
    def strategy(self) -> Any:
        """Touched rows of the table, whoever else uses it."""
        if self.build is not Tied:
            return Parallax(update=self.update)
        rows = Rows(update=self.update)
        return Strategy(rules=(Rule(pattern="table.weight", sync=rows), Rule(pattern="head.weight", sync=rows)))

    @property
    def name(self) -> str:
        """For the test's."""
        kind = "sparse" if self.sparse else "dense"
        return f"{self.build.__name__}-{self.optimizer.__name__}-{kind}-{self.update}"


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """By name, of their own."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def elastic(case: Case, micro: int | None = None, batch: int = BATCH, clip: float | None = None) -> dict[str, Tensor]:
    """Train under Rows; `micro`: most samples a rank takes at once."""
    model = case.model(sparse=case.sparse)
    optimizer = case.optimizer(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=case.strategy)
    loader = er.AdaptiveDataLoader(data(), batch_size=batch, seed=3)
    if micro is not None:
        loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(EPOCHS):
        for ids, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(ids), classes).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return parameters(model)


def by_torch(case: Case, world: int = 1, batch: int = BATCH, clip: float | None = None) -> dict[str, Tensor]:
    """Train on whole batches with dense gradients, without our code but for the order of samples and short tails."""
    model = case.model(sparse=False)
    optimizer = case.optimizer(model)
    for epoch in range(EPOCHS):
        order = IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]
        position = 0
        while count := step_size(position=position, total=SAMPLES, batch_size=batch, world_size=world):
            ids, classes = data()[torch.from_numpy(order[position : position + count])]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids), classes).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            position += count
    return parameters(model)


def assert_same_update(case: Case, found: dict[str, Tensor], wanted: dict[str, Tensor], share: float) -> None:
    """Within a share of the largest change that training has made to a parameter."""
    begin = parameters(case.model(sparse=False))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        largest = float((tensor - begin[name]).abs().max())
        assert float((found[name] - tensor).abs().max()) <= share * largest, name
