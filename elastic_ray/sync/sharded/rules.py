"""Update rules for rows of sharded tables, as values (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from elastic_ray.sync.checks import StrategyError

# What of a parameter group changes the update in a way that rows of a table are not updated in, and what is none.
_UNSERVED = {
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "weight_decay": 0,
    "maximize": False,
    "lr_decay": 0,
    "differentiable": False,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """Base class for rules that update table rows, at ``lr_factor`` x the first parameter group's learning rate."""

    # the table's learning rate is that of the wrapped optimizer (with its schedule and the step's factor) times this;
    # more than 0
    lr_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.lr_factor < math.inf:
            raise ValueError(f"lr_factor must be more than 0 and finite, but got {self.lr_factor}")

    @property
    def initial(self) -> Mapping[str, float]:
        """Initial value of each state tensor, keyed by name."""
        return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSGD(RowRule):
    """Update rule p <- p - lr g, like ``torch.optim.SGD`` without momentum or weight decay.

    Examples:
        >>> from elastic_ray.sync import RowSGD
        >>> RowSGD(lr_factor=0.5)
        RowSGD(lr_factor=0.5)
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowAdagrad(RowRule):
    """Update rule s <- s + g^2, p <- p - lr g / (sqrt(s) + eps), like ``torch.optim.Adagrad`` without decays.

    Attributes:
        initial_accumulator_value: Value of s before the first update, at least 0.
        eps: Constant added to the root, at least 0.

    Examples:
        >>> from elastic_ray.sync import RowAdagrad
        >>> RowAdagrad()
        RowAdagrad(lr_factor=1.0, initial_accumulator_value=0.0, eps=1e-10)
    """

    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        RowRule.__post_init__(self)
        for name in ("initial_accumulator_value", "eps"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more and finite, but got {getattr(self, name)}")

    @property
    def initial(self) -> Mapping[str, float]:
        return {"sum": self.initial_accumulator_value}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowAdam(RowRule):
    """Update rule that applies Adam only to the rows in a step, like ``SparseAdam``; other rows keep their moments.

    As in ``SparseAdam``, bias correction counts updates of the entire table, not of each row. If a row is first used
    late in training, its first updates are therefore not corrected for its small moments.

    Attributes:
        betas: Decay rates of the first and second moments, each in [0, 1).
        eps: Constant added to the root, at least 0.

    Examples:
        >>> from elastic_ray.sync import RowAdam
        >>> RowAdam(betas=(0.9, 0.99))
        RowAdam(lr_factor=1.0, betas=(0.9, 0.99), eps=1e-08)
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        RowRule.__post_init__(self)
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, but got {self.betas}")
        if not 0.0 <= self.eps < math.inf:
            raise ValueError(f"eps must be 0 or more and finite, but got {self.eps}")

    @property
    def initial(self) -> Mapping[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


_BY_NAME: dict[str, type[RowRule]] = {"sgd": RowSGD, "adagrad": RowAdagrad, "adam": RowAdam}


def named_rule(optimizer: RowRule | str | None) -> RowRule | None:
    """Return the update rule for a table's ``optimizer`` argument; None stands for the wrapped optimizer's rule.

    >>> named_rule("sgd")
    RowSGD(lr_factor=1.0)

    Raises:
        ValueError: no rule has this name.
        TypeError: the argument is not a rule, a name, or None.
    """
    if optimizer is None or isinstance(optimizer, RowRule):
        return optimizer
    if not isinstance(optimizer, str):
        raise TypeError(
            f"optimizer must be a rule for rows (RowSGD, RowAdagrad, RowAdam), its name or None, not {optimizer!r}: "
            "a torch optimizer steps whole parameters, which a sharded table has not"
        )
    if optimizer not in _BY_NAME:
        raise ValueError(f"optimizer must be one of {', '.join(_BY_NAME)}, but got {optimizer!r}")
    return _BY_NAME[optimizer]()


def rule_of(optimizer: str, group: Mapping[str, Any]) -> RowRule:
    """Return the update rule that is equivalent to a torch optimizer, given its class name and parameter group.

    Raises StrategyError if no rule is equivalent.
    """
    found: RowRule | None = None
    if optimizer == "SGD":
        found = RowSGD()
    elif optimizer == "Adagrad":
        found = RowAdagrad(initial_accumulator_value=group["initial_accumulator_value"], eps=group["eps"])
    elif optimizer == "SparseAdam":
        found = RowAdam(betas=tuple(group["betas"]), eps=group["eps"])
    others = [f"{name}={group[name]}" for name, none in _UNSERVED.items() if group.get(name, none) != none]
    if found is None or others:
        what = f"{optimizer}({', '.join(others)})" if others else optimizer
        raise StrategyError(
            f"the rows of a ShardedEmbedding cannot be updated as {what} would: choose their rule by name, "
            'ShardedEmbedding(..., optimizer="sgd"), "adagrad" or "adam" (only rows that a step has touched, as '
            "SparseAdam); its learning rate follows that of the wrapped optimizer"
        )
    return found
