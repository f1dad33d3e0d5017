"""Sharded tables of one wrapped model, during training and group changes (torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.consensus.intents import Announced
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.sharded.embedding import ShardedEmbedding
from elastic_ray.sync.sharded.rules import rule_of
from elastic_ray.sync.sharded.table import ShardedTable

if TYPE_CHECKING:
    from elastic_ray.run.run import Run


class ModelTables:
    """Sharded tables of one wrapped model; a model without tables has no overhead.

    Raises StrategyError if a table cannot be trained with this optimizer or this scaler.
    """

    def __init__(
        self, run: Run, module: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int, scaler: Any = None
    ) -> None:
        self._run, self._optimizer = run, optimizer
        layers = {name: each for name, each in module.named_modules() if isinstance(each, ShardedEmbedding)}
        if layers and scaler is not None and scaler.is_enabled():
            raise StrategyError(
                "grad_scaler is not supported for a model with a ShardedEmbedding: the scaler checks the gradients of "
                "parameters for overflow, and table rows are not parameters. Train in bfloat16, which needs no scaler"
            )
        self.tables: list[ShardedTable] = [
            layer.join(
                layer.rule or rule_of(type(optimizer).__name__, optimizer.param_groups[0]), name, (number, index), run
            )
            for index, (name, layer) in enumerate(layers.items())
        ]

    def __bool__(self) -> bool:
        return bool(self.tables)

    def join(self, what: Announced) -> None:
        """Participate in a table's row exchange announced by other ranks, although this rank has no samples."""
        self.tables[what.detail // 4].join()

    def exchange(self) -> None:
        """Send row gradients from a finished backward pass to the row owners, and vote that all have arrived.

        No rank applies gradients before the vote has ended.
        """
        for table in self.tables:
            table.push()
        communicator = self._run.group.communicator
        vote = communicator.gradients.all_reduce(torch.ones(1, dtype=torch.float32))
        self._run.moment("vote")
        communicator.wait(vote)

    def zero(self) -> None:
        """Clear the row gradients of all tables, like ``zero_grad``."""
        for table in self.tables:
            table.zero()

    def update(self) -> None:
        """Update the tables with the current learning rate of the optimizer's first group."""
        for table in self.tables:
            table.update(float(self._optimizer.param_groups[0]["lr"]))

    @property
    def settled(self) -> bool:
        """True if this rank is able to save all tables."""
        return all(table.settled for table in self.tables)
