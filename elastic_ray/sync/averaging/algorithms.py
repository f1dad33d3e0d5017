"""Algorithms that average models at the end of a period: local SGD, DiLoCo, SMA and pair averaging (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.sync.spec import Average

if TYPE_CHECKING:
    from elastic_ray.sync.averaging.drift import Replica


class Averager:
    """Base class for algorithms that average one model; all ranks call them after the same steps.

    Parameters and the averager's own state change only after all collectives have finished, so a failed collective
    leaves both unchanged. By default, an algorithm computes the mean over all ranks and keeps no state.
    """

    def run(self, model: Replica) -> None:
        """Average this rank's model with the other ranks' models at the end of a period.

        Args:
            model: This rank's parameters, with access to the other ranks' parameters.

        Raises CommunicationFailedError if the group breaks, leaving this rank's model and averager unchanged.
        """
        raise NotImplementedError

    def prepare(self, model: Replica) -> None:
        """Start the collectives that :meth:`run` needs, while the ranks are still voting on committing the steps."""
        model.start_mean()

    def start(self, model: Replica) -> None:
        """Initialise the algorithm's state, or extend it to added parameters; values must be the same on all ranks."""

    def capture(self) -> Any:
        """Return the averager's state for joining ranks and checkpoints; it is the same on all ranks."""
        return {}

    def restore(self, tree: Any) -> None:
        """Restore a state captured by the same algorithm."""


class MeanAverager(Averager):
    """Averager that moves models towards the mean: w_r <- (1 - alpha) w_r + alpha x mean over ranks of w.

    With alpha = 1, it is local SGD (Stich, "Local SGD converges fast and communicates little", ICLR 2019), else SMA
    (KungFu's ``sma_sgd.py``, OSDI 2020, after EA-SGD). KungFu averages before the gradient update; this class averages
    after it. Optimizer moments stay local to each rank, as in torch's ``PostLocalSGDOptimizer``: they come from local
    gradients, and averaging them would double or triple the traffic.

    Args:
        alpha: Fraction of the distance to the mean that each average moves a model, up to 1.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def run(self, model: Replica) -> None:
        """Move this rank's parameters by the fraction ``alpha`` of the distance to their mean over all ranks."""
        move_towards(model, model.mean(), self._alpha)


class PairAverager(Averager):
    """Averager that moves a model halfway to another, random rank's model before each update.

    w_r <- w_r + (w_s - v_r) / 2, where w_s is the newest model that the other rank s has published, and v_r is this
    rank's model when s published it: a mean with w_r itself would undo half of the steps made since. Source: KungFu's
    ``PairAveragingOptimizer`` (OSDI 2020), after AD-PSGD (Lian et al., ICML 2018), in which both ranks adopt the mean.
    Models are pulled during steps, and no rank waits for one. If no model has arrived, the rank keeps its own.
    """

    def prepare(self, model: Replica) -> None:
        """Do nothing, because no mean over all ranks is computed."""

    def run(self, model: Replica) -> None:
        """Do nothing, because models are averaged by :meth:`mix` before each update."""

    @torch.no_grad()
    def mix(self, model: Replica, now_s: float) -> None:
        """Average this rank's model with the pulled model (if any), publish the result, and request another model.

        Args:
            now_s: Present time [s, monotonic].
        """
        away = model.pulled(now_s)
        if away is not None:
            params = list(model.named.values())
            torch._foreach_add_(params, [each.to(p) for each, p in zip(away, params, strict=True)], alpha=0.5)
        model.publish(now_s)


class DiLoCoAverager(Averager):
    """Averager that takes an outer SGD step with Nesterov momentum, from the anchor towards the mean model.

    The anchor a (the model after the last outer step) and the outer momentum m are the same on all ranks; w is the mean
    of the ranks' models: d = a - w;  m <- mu m + d;  a <- a - lr (d + mu m);  w_r <- a. Source: Douillard et al., arXiv
    2311.08105.

    Args:
        outer_lr: Outer learning rate lr, above 0.
        outer_momentum: Outer momentum coefficient mu, from 0 to 1.
    """

    def __init__(self, outer_lr: float, outer_momentum: float) -> None:
        self._lr, self._mu = outer_lr, outer_momentum
        self._anchor: dict[str, torch.Tensor] = {}
        self._momentum: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def start(self, model: Replica) -> None:
        """Set the anchor (outer model) of new parameters to their current values, and their outer momentum to zero."""
        for name, p in model.named.items():
            anchor = self._anchor.get(name)
            if anchor is not None and anchor.shape == p.shape:  # those of a checkpoint are on the CPU
                self._anchor[name], self._momentum[name] = anchor.to(p.device), self._momentum[name].to(p.device)
            else:
                self._anchor[name] = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
                self._momentum[name] = torch.zeros_like(self._anchor[name])

    @torch.no_grad()
    def run(self, model: Replica) -> None:
        """Make the outer step, and set this rank's parameters to the new anchor (the model after that step)."""
        mean = model.mean()
        names = list(model.named)
        anchor, momentum = [self._anchor[name] for name in names], [self._momentum[name] for name in names]
        way = torch._foreach_sub(anchor, list(mean))
        torch._foreach_mul_(momentum, self._mu)
        torch._foreach_add_(momentum, way)
        torch._foreach_add_(way, momentum, alpha=self._mu)
        torch._foreach_add_(anchor, way, alpha=-self._lr)
        move_towards(model, anchor, 1.0)

    def capture(self) -> Any:
        """Return the anchor (the model after the last outer step) and the outer momentum."""
        return {"anchor": dict(self._anchor), "momentum": dict(self._momentum)}

    def restore(self, tree: Any) -> None:
        """Restore the anchor and the outer momentum returned from :meth:`capture`."""
        self._anchor, self._momentum = dict(tree["anchor"]), dict(tree["momentum"])


def make_averager(average: Average) -> Averager:
    """Return the averager for the algorithm described by a strategy's ``average``."""
    match average.algorithm:
        case "diloco":
            return DiLoCoAverager(average.outer_lr, average.outer_momentum)
        case "sma":
            return MeanAverager(average.alpha)
        case "pair":
            return PairAverager()
        case _:
            return MeanAverager(1.0)


@torch.no_grad()
def move_towards(model: Replica, values: Sequence[torch.Tensor], share: float) -> None:
    """Move this rank's parameters towards ``values`` by the fraction ``share``."""
    for p, given in zip(model.named.values(), values, strict=True):
        value = given.to(p.device)
        if share == 1.0:
            p.copy_(value)
        elif p.dtype == value.dtype:
            p.lerp_(value, share)
        else:
            p.copy_(torch.lerp(p.to(value.dtype), value, share))
