"""Schedule for averaging a model whose replicas diverge, and their consensus when required (torch)."""

from __future__ import annotations

import dataclasses
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.communication.model_exchange import ModelExchange
from elastic_ray.state.layout import digest
from elastic_ray.state.tree import as_divided
from elastic_ray.sync.averaging.algorithms import Averager, PairAverager, make_averager, move_towards
from elastic_ray.sync.averaging.consensus import agree, layout, mean
from elastic_ray.sync.device_numbers import local
from elastic_ray.sync.spec import Average

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.sync.engine.trainable import Trainable

# Averages of one step are counted by model, a consensus after all of them.
_OF_A_STEP = 256
_CONSENSUS = _OF_A_STEP - 1
_OUTSIDE = (
    "the model is trained outside of a loop over an AdaptiveDataLoader, in a group of several workers: with a strategy "
    "that averages models each of them steps by itself there, and nothing is averaged. Iterate an AdaptiveDataLoader"
)
_SCALE, _TRACKER = "scale", "_growth_tracker"


class Drift:
    """Scheduler of one model's averages, which also makes the ranks' replicas identical when required.

    Models are averaged between two steps, after all ranks have committed the same step. The *consensus* is the mean
    over ranks of the parameters and of the optimizer's floating-point state; averaging only the parameters would leave
    each rank with its own moments. AMP's scalers continue with the smallest loss scale of any rank, because gradients
    must have the same scale to be summed.

    Args:
        optimizer: Optimizer of the model's parameters.
        scaler: AMP's ``GradScaler``, which each rank updates from its local gradients; None without AMP.
    """

    def __init__(
        self,
        context: Run,
        trainable: Trainable,
        optimizer: torch.optim.Optimizer,
        number: int,
        scaler: Any = None,
    ) -> None:
        self._context, self._trainable, self._optimizer, self._number = context, trainable, optimizer, number
        # as given; None where it is not enabled
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._replica = Replica(trainable, context)
        self.average: Average | None = None  # how the present strategy averages models; None for not at all
        self._averager: Averager | None = None
        self._begun = self._changed = self._warned = False
        self._settled_at = self._equal_at = -1  # committed steps at the last consensus, and when all had one model
        self._marker = 0

    def adapt(self, average: Average | None) -> None:
        """Adopt the current strategy's averaging (None for no averaging) and the current set of trained parameters."""
        self._begun = False
        drifting = self._context.registry.drifting
        (drifting.discard if average is None else drifting.add)(self._number)
        if average != self.average:
            self.average = average
            self._replica.exchange.close()
            self._averager = None if average is None else make_averager(average)

    @property
    def on(self) -> bool:
        """True while each rank is updating its replica with local gradients only."""
        average = self.average
        return average is not None and (average.until is None or self._context.states.progress.steps < average.until)

    @property
    def steps_to_average(self) -> int:
        """Number of steps until the next average of the model; 1 if gradients are reduced at every step."""
        average, steps = self.average, self._context.states.progress.steps
        if average is None or not self.on:
            return 1
        left = average.period - steps % average.period
        return left if average.until is None else min(left, average.until - steps)

    @property
    def settled(self) -> bool:
        """True if the replicas on all ranks are identical after the steps committed so far."""
        alone = self._context.group.world_size == 1
        return alone or self.average is None or not self.on or self._settled_at == self._context.states.progress.steps

    @property
    def marker(self) -> int:
        """Number that identifies the last average this rank completed; it increases over time, and is 0 at first.

        If the group breaks during an average, possibly only some of its ranks complete it. Only these ranks contribute
        to the next mean, because their models already include all other ranks' contributions.
        """
        return self._marker

    def start_step(self) -> None:
        """Initialise averaging at a loader's first step; replicas may differ until then."""
        if (
            not self._begun
            and self.average is not None
            and self.on
            and self._averager is not None
            and self._context.ledger.step is not None
        ):
            self._begun = True
            self._averager.start(self._replica)

    def record_update(self) -> None:
        """Record an optimizer step; warn once if it is outside a loader's loop, where models are not averaged."""
        if self.average is None or not self.on:
            return
        self._changed, self._equal_at = True, -1
        if isinstance(self._averager, PairAverager):
            self._averager.mix(self._replica, time.monotonic())
        several = self._context.group.world_size > 1
        if several and self._context.ledger.step is None and not self._warned:
            self._warned = True
            self._context.notify("warning", _OUTSIDE)

    def prepare(self, *, ends_pass: bool) -> None:
        """Start an average that is due while ranks are still voting on its last steps; raises like :meth:`after_step`.

        If the pass ends without an average of all models, this starts computing the mean that :meth:`collapse` adopts.
        """
        average, steps = self.average, self._context.states.progress.steps
        if average is None or self._averager is None or (average.until is not None and steps > average.until):
            return
        if steps != average.until and not steps % average.period and not (self.pulls and ends_pass):
            self._averager.prepare(self._replica)
        elif ends_pass:
            self._replica.start_mean()

    def after_step(self, *, ends: bool) -> None:
        """Average the replicas if the committed step completes a period, or make them identical if averaging ``ends``.

        Raises CommunicationFailedError if the group breaks.
        """
        average, steps = self.average, self._context.states.progress.steps
        if average is None or self._averager is None or (average.until is not None and steps > average.until):
            return
        if ends or steps == average.until:
            self.collapse()
        elif steps % average.period == 0:
            self._context.moment("average")
            self._averager.run(self._replica)
            if self.pulls:
                if not self._replica.exchange.stands:
                    self.enter_exchange(self._context.group.communicator)
                return  # no rank's model holds the others' steps
            self._marker = max(self._marker, steps * _OF_A_STEP + self._number % _CONSENSUS + 1)
            if average.algorithm == "local_sgd":
                self._equal_at = steps

    @property
    def pulls(self) -> bool:
        """True if each rank averages with models that it pulls from other ranks (pair averaging)."""
        return isinstance(self._averager, PairAverager)

    def enter_exchange(self, communicator: Communicator) -> None:
        """Start exchanging models (pair averaging) in a new group; called on every rank.

        Raises CommunicationFailedError if the group breaks.
        """
        self._replica.enter_exchange(communicator)

    @property
    def layout(self) -> int:
        """Digest of the tensors merged by :meth:`collapse`, and of whether this rank has changed them."""
        return digest((layout(self._trees()), self._changed))

    def collapse(self, *, alike: bool = False) -> None:
        """Set all replicas to the consensus (their mean); called on every rank after the same committed step.

        Args:
            alike: Whether all ranks are known to have the same :attr:`layout`.

        Raises CommunicationFailedError if the group breaks, leaving this rank's model unchanged.
        """
        communicator, steps = self._context.group.communicator, self._context.states.progress.steps
        if communicator.world_size > 1:
            started = self._replica.mean_started
            trees = self._trees(params=not started and self._equal_at != steps)
            with communicator.together():  # workers of a unit may hold unlike tensors
                amp = smallest_scale(communicator, self.scaler, counts=True)
                if alike:
                    agreed = mean(communicator, trees) if self._changed else None
                else:
                    agreed = agree(communicator, trees, holds=True, counts=True, changed=self._changed)
                averaged = self._replica.mean() if started else None
            if averaged is not None:
                move_towards(self._replica, averaged, 1.0)
            self._adopt_agreed(agreed)
            set_scale(self.scaler, amp)
        self._replica.drop_pull()
        self._marker = max(self._marker, steps * _OF_A_STEP + _CONSENSUS)
        self._changed, self._settled_at = False, steps

    def agree_on_scale(self) -> None:
        """Set the loss scale on all ranks to the smallest one; called on every rank after the same committed step."""
        communicator = self._context.group.communicator
        if communicator.world_size > 1:
            set_scale(self.scaler, smallest_scale(communicator, self.scaler, counts=True))

    def reconcile(self, communicator: Communicator, marker: int, *, holds: bool, counts: bool) -> None:
        """Make all ranks that have a trained state identical in a new group, before its ranks exchange state.

        Args:
            marker: Latest :attr:`marker` of any of these ranks.
            holds: Whether this rank holds a trained state.
            counts: Whether this rank contributes to the mean, because it completed the latest average.

        Raises CommunicationFailedError if the group breaks, leaving this rank's model unchanged.
        """
        trees = self._trees()
        if self._averager is not None:
            trees["averager"] = self._averager.capture()
        with communicator.together():
            amp = smallest_scale(communicator, self.scaler, counts=counts)
            agreed = agree(communicator, trees, holds=holds, counts=counts, changed=self._changed)
        self._adopt_agreed(agreed)
        if agreed is not None and self._averager is not None and "averager" in agreed:
            self._averager.restore(agreed["averager"])
            self._begun = False  # it is to find its tensors beside their parameters
        if holds:
            self._marker = marker
            set_scale(self.scaler, amp)

    def entered(self) -> None:
        """Record that all replicas are identical in a newly entered group."""
        self._replica.drop()
        self._replica.exchange.close()
        self._changed, self._equal_at, self._settled_at = False, -1, self._context.states.progress.steps

    def capture(self) -> dict[str, Any]:
        """Return the state for joining ranks and checkpoints; empty if models have never been averaged."""
        found: dict[str, Any] = {"marker": self._marker} if self._marker else {}
        if self.average is not None and self._averager is not None:
            found |= {"algorithm": self.average.algorithm, "averager": self._averager.capture()}
        return found

    def restore(self, tree: dict[str, Any]) -> None:
        """Restore a captured state; if another algorithm captured it, initialise the averager instead."""
        self._begun, self._marker = False, tree.get("marker", 0)
        if self.average is not None and self._averager is not None:
            if tree.get("algorithm") == self.average.algorithm:
                self._averager.restore(tree["averager"])
            else:
                self._averager = make_averager(self.average)

    def _trees(self, *, params: bool = True) -> dict[str, Any]:
        """Return the trees that replicas must agree on: each parameter (if ``params``) and its optimizer state."""
        state = self._optimizer.state
        found: dict[str, Any] = {}
        for index, p in enumerate(self._trainable.params):
            if params:
                found[f"p{index}"] = p
            if state.get(p):
                found[f"s{index}"] = dict(state[p])
        return found

    @torch.no_grad()
    def _adopt_agreed(self, agreed: dict[str, Any] | None) -> None:
        """Replace this rank's model and optimizer state with the agreed ones; None changes nothing."""
        for index, p in enumerate(self._trainable.params if agreed is not None else ()):
            if f"p{index}" in agreed:  # type: ignore[operator]
                local(p).copy_(agreed[f"p{index}"])  # type: ignore[index]
            if f"s{index}" in agreed:  # type: ignore[operator]
                self._optimizer.state[p] = as_divided(_beside(p, agreed[f"s{index}"]), p)  # type: ignore[index]


def _beside(param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer state with CUDA tensors moved to the parameter's device."""
    return {
        key: value.to(param.device) if isinstance(value, torch.Tensor) and value.is_cuda else value
        for key, value in state.items()
    }


def smallest_scale(communicator: Communicator, scaler: Any, *, counts: bool) -> tuple[float, int] | None:
    """Return the smallest AMP loss scale of the contributing ranks; called on every rank.

    Args:
        scaler: This rank's ``GradScaler``, enabled; None on all ranks without AMP.
        counts: Whether this rank contributes its scale.

    Returns the scale and its growth counter: the smallest number of steps since the last scale change, over the ranks
    with that scale. None without AMP, or if no rank contributes.
    """
    if scaler is None:
        return None
    state = scaler.state_dict()
    # In whole numbers, as which positive floats have the same order.
    (bits,) = struct.unpack("<i", struct.pack("<f", state[_SCALE]))
    told = communicator.gather_ints([int(counts), bits, state[_TRACKER]], with_gradients=True)
    rows = [row for row in told if row[0]]
    if not rows:
        return None
    _, bits, tracker = min(rows)
    return struct.unpack("<f", struct.pack("<i", bits))[0], tracker


def set_scale(scaler: Any, agreed: tuple[float, int] | None) -> None:
    """Set the scaler to the scale and growth counter in ``agreed``; do nothing if ``agreed`` is None."""
    if agreed is not None:
        scaler.load_state_dict({**scaler.state_dict(), _SCALE: agreed[0], _TRACKER: agreed[1]})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Flat:
    """Flat buffer for the parameters with one dtype and device."""

    members: tuple[int, ...]  # their positions
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]  # of it, in the shape of each


class Replica:
    """Access for averagers to this rank's model and to other ranks' models.

    Half-precision parameters are summed in float32. If a collective fails, its buffers are abandoned, and new ones are
    allocated for the next average.
    """

    def __init__(self, trainable: Trainable, context: Run) -> None:
        self._trainable, self._context = trainable, context
        self._laid_out: list[torch.Tensor] = []
        self._flats: list[_Flat] = []
        self._incoming: list[_Flat] = []  # of a rank that is asked for its model
        self._into: list[torch.Tensor] = []
        self._asked: list[torch.Tensor] = []  # this rank's model when it asked; empty if it was replaced since
        self._asked_s = 0.0  # when it did
        self._layout = 0
        self._works: list[Any] | None = None  # of a mean that was begun
        self.exchange = ModelExchange()
        context.exchanges.append(self.exchange)

    @property
    def world_size(self) -> int:
        """Number of ranks whose models are averaged."""
        return self._communicator.world_size

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """Parameters trained on this rank, keyed by name; for divided parameters, this worker's part."""
        return self._trainable.named

    @property
    def _communicator(self) -> Communicator:
        return self._context.group.communicator

    def start_mean(self) -> None:
        """Start summing all ranks' current parameters; :meth:`mean` waits for the sum."""
        self._fill()
        group = self._communicator
        try:
            self._works = [group.gradients.all_reduce(each.flat) for each in self._flats]
        except CommunicationFailedError:
            self.drop()
            raise

    @property
    def mean_started(self) -> bool:
        """True from :meth:`start_mean` until :meth:`mean`."""
        return self._works is not None

    def drop(self) -> None:
        """Abandon buffers that may still be in use by failed or cancelled collectives."""
        self._laid_out, self._works = [], None

    def mean(self) -> list[torch.Tensor]:
        """Return the mean of parameters over all ranks, in float32 or wider; the next call overwrites its memory."""
        group = self._communicator
        if group.world_size == 1:
            self._fill()
        else:
            if self._works is None:
                self.start_mean()
            works, self._works = self._works, None
            try:
                with group.together():  # a worker of a unit may have more buffers than another one
                    for work in works or ():
                        group.wait(work)
            except CommunicationFailedError:
                self.drop()
                raise
            for each in self._flats:
                each.flat.div_(group.world_size)
        return _in_order(self._flats)

    def enter_exchange(self, communicator: Communicator) -> None:
        """Connect all ranks, to pull models from each other; raises CommunicationFailedError if the group breaks."""
        membership = self._context.membership
        self._incoming = []  # a pull of the former group may still write there
        self.exchange.enter(communicator, called_off=lambda: membership.voided)

    def publish(self, now_s: float) -> None:
        """Publish the current parameters, and start to pull a random rank's parameters."""
        if self.exchange.stands:
            self._fill()
            if not self._incoming:
                shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.named.items()]
                self._incoming, self._layout = _lay_out(list(self.named.values()), "cpu"), digest(shapes)
                self._into = [each.flat for each in self._incoming]
            self.exchange.publish(self._layout, [each.flat for each in self._flats], now_s)
            if self.exchange.ask(self._layout, self._into):
                self._asked, self._asked_s = [each.flat.to("cpu", copy=True) for each in self._flats], now_s

    def pulled(self, now_s: float) -> list[torch.Tensor] | None:
        """Return the pulled model minus this rank's model at the same time; None if none has arrived.

        Of this rank, its present model is known, that at the time of the request, and the last two that it published.
        """
        published_s = self.exchange.arrived(self._into)
        if published_s is None or not self._asked or self._outdated(list(self.named.values())):
            return None
        known = [(self._asked_s, self._asked), *self.exchange.held(self._layout), (now_s, [])]
        own = min(known, key=lambda each: abs(each[0] - published_s))[1]
        if not own:
            self._fill()
            own = [each.flat.to("cpu") for each in self._flats]
        torch._foreach_sub_(self._into, own)
        return _in_order(self._incoming)

    def drop_pull(self) -> None:
        """Ignore the model being pulled, because this rank's own model has been replaced since the request."""
        self._asked = []

    def _outdated(self, params: Sequence[torch.Tensor]) -> bool:
        """True if the flat buffers are for different parameters, because some parameters were unfrozen."""
        known = self._laid_out
        return len(params) != len(known) or any(a is not b for a, b in zip(params, known, strict=True))

    @torch.no_grad()
    def _fill(self) -> None:
        """Copy the current parameters into the flat buffers."""
        params = list(self.named.values())
        if self._outdated(params):
            self._laid_out = params
            self._flats, self._incoming = _lay_out(params), []
        for each in self._flats:
            torch._foreach_copy_(list(each.views), [params[i] for i in each.members])


def _lay_out(params: Sequence[torch.Tensor], device: str | None = None) -> list[_Flat]:
    """Return one flat buffer for each dtype and device of the parameters, on ``device`` if given."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, p in enumerate(params):
        kinds.setdefault((torch.promote_types(p.dtype, torch.float32), p.device), []).append(index)
    made = []
    for (dtype, own), members in kinds.items():
        sizes = [params[i].numel() for i in members]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device or own)
        views = [v.view(params[i].shape) for i, v in zip(members, torch.split(flat, sizes), strict=True)]
        made.append(_Flat(members=tuple(members), flat=flat, views=tuple(views)))
    return made


def _in_order(flats: Sequence[_Flat]) -> list[torch.Tensor]:
    """Return the views of all buffers, in parameter order."""
    found = {index: view for each in flats for index, view in zip(each.members, each.views, strict=True)}
    return [found[index] for index in sorted(found)]
