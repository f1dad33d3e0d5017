"""Inputs of a strategy's planner: a model's parameters, its optimizer, and the ranks of a group (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """Description of one trainable parameter.

    Attributes:
        names: those it has in the model, more than one where it is tied.
        shape: of the tensor.
        dtype: of the tensor, as ``"float32"``.
        itemsize: bytes of an element.
        device: as ``"cpu"``; ranks may have other numbers of one kind.
        group: its parameter group in the optimizer.
        sparse: a layer that is set to ``sparse=True`` gives it gradients.
        table: only embedding layers use it, as far as the module tree tells.
        rows: distinct rows that a rank has touched in a step, the median; None while unknown, or not a table.
        divisible: its elements lie in memory in order, so that a part of them is a tensor, too.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"
    itemsize: int = 4
    device: str = "cpu"
    group: int = 0
    sparse: bool = False
    table: bool = False
    rows: int | None = None
    divisible: bool = True

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerInfo:
    """An optimizer, as far as strategies depend on it.

    Attributes:
        name: of its class.
        takes_sparse: whether it steps sparse gradients, and as it would dense ones.
        only_sparse: whether it steps nothing else (SparseAdam).
        elementwise: whether an element's update depends on no other element of its tensor.
    """

    name: str = "SGD"
    takes_sparse: bool = True
    only_sparse: bool = False
    elementwise: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model.

    Attributes:
        params: trainable parameters, group by group, in the model's order within each.
        optimizer: steps them.
        by_group: the optimizer of each parameter group, where the model has several.
        frozen: names of parameters that are not trained at present.
    """

    params: tuple[ParamInfo, ...]
    optimizer: OptimizerInfo = OptimizerInfo()
    by_group: tuple[OptimizerInfo, ...] = ()
    frozen: tuple[str, ...] = ()

    def optimizer_of(self, param: ParamInfo) -> OptimizerInfo:
        """Return the optimizer that steps a parameter."""
        return self.by_group[param.group] if self.by_group else self.optimizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks of a group.

    Attributes:
        nodes: the node of each rank, by any name.
        domains: the network's domain of each node, likewise; none where not all labels say it.
    """

    nodes: tuple[str, ...] = ("node-0",)
    domains: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def node_numbers(self) -> tuple[int, ...]:
        """The node of each rank, as a number from 0 on; nodes of one domain are neighbours."""
        return _numbers(tuple(zip(self.domains, self.nodes, strict=True)) if self.domains else self.nodes)

    @property
    def level_numbers(self) -> tuple[int, ...]:
        """The domain of each rank, as a number from 0 on, where the group spans several; else its node."""
        return _numbers(self.domains) if len(set(self.domains)) > 1 else self.node_numbers

    @property
    def why_flat(self) -> str:
        """Reason why there are no two levels; empty where there are."""
        there = len(set(self.level_numbers))
        if there == 1:
            return "all ranks are on one node"
        return "" if there < self.world_size else "no two ranks share a node or domain"


def _numbers(names: Sequence[object]) -> tuple[int, ...]:
    order = sorted(set(names), key=str)
    return tuple(order.index(name) for name in names)
