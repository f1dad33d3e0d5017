"""Changes that user code makes to parameters outside optimizer steps, such as weight averages (torch).

In a sharded model, a rank's parameters contain only the rows that the rank owns. The rank also holds copies of rows
owned by other ranks, which are not part of its model. Like an update, a change must be made to both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from elastic_ray.state.layout import ReplicasDifferError

_LOOKED_AT = 8

_HOW = (
    "Change them where the optimizer steps, by optimizer.register_step_post_hook(lambda *_: "
    "elastic_ray.sync.change_parameters(function, parameters)), which reaches all rows, or by load_state_dict() on all "
    "ranks; see docs/recipes.md, An average of the weights"
)


@dataclasses.dataclass(frozen=True, slots=True)
class UpdatedRows:
    """Rows of a sharded model changed by the update in progress, for :func:`change_parameters`."""

    places: Mapping[int, int]  # position of each of the model's parameters, by ``id``
    # of each shard that this rank holds the rows by that position; without parameters of which it has none
    shards: Sequence[Mapping[int, Tensor]]
    by_hand: HandChanges  # is not to take what is changed here for changes by hand

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Make the rows accessible to :func:`change_parameters` within the context."""
        token = _UPDATED.set(self)
        try:
            yield
        finally:
            _UPDATED.reset(token)


_UPDATED: ContextVar[UpdatedRows | None] = ContextVar("elastic_ray_updated_rows", default=None)


@torch.no_grad()
def change_parameters(change: Callable[..., object], *of: nn.Module | Iterable[Tensor]) -> None:
    """Change parameters element by element outside optimizer steps, on every worker that holds them.

    Use this function in an optimizer hook if the model is sharded (``fully_shard``), because changing
    ``model.parameters()`` directly only affects the rows owned by that worker. Parameters that are not sharded are
    passed to ``change`` unchanged.

    Args:
        change: Function called once per shard on this worker, with one list of tensors for each argument in ``of``.
            Tensors at the same position hold the same rows of their parameters. The function must change tensors in
            place, and in the same way on all workers; each element may depend only on elements at the same position.
        of: Modules or lists of parameters, all with the same number of parameters and the same shapes.

    Raises:
        TypeError: ``change`` is not a function, or an argument in ``of`` contains anything other than tensors.
        ValueError: no parameters were given, or parameters at the same position differ in shape.
        RuntimeError: some parameters are sharded, and no update of their model is in progress.
    """
    groups = _checked(change, of)
    every = [param for group in groups for param in group]
    if not any(hasattr(param, "to_local") for param in every):
        change(*([param.detach() for param in group] for group in groups))
        return
    updated = _UPDATED.get()
    if updated is None or any(id(param) not in updated.places for param in every):
        raise RuntimeError(
            "change_parameters(...) of sharded parameters must be called while their optimizer steps, for parameters "
            "of the module that AdaptiveDataParallel wraps with it: optimizer.register_step_post_hook(lambda *_: "
            "elastic_ray.sync.change_parameters(...)); see docs/recipes.md, An average of the weights"
        )
    places = list(zip(*([updated.places[id(param)] for param in group] for group in groups), strict=True))
    with updated.by_hand.served():
        for rows in updated.shards:
            here = [each for each in places if each[0] in rows]  # of one shape, so a shard has rows of all or of none
            if here:
                change(*([rows[place].detach() for place in column] for column in zip(*here, strict=True)))


def _checked(change: object, of: Sequence[nn.Module | Iterable[Tensor]]) -> list[list[Tensor]]:
    """Return the lists of parameters; raise TypeError or ValueError like :func:`change_parameters`."""
    if not callable(change):
        raise TypeError(f"change must be a function of lists of tensors, but got {change!r:.80}")
    groups = [list(each.parameters() if isinstance(each, nn.Module) else each) for each in of]
    for param in (param for group in groups for param in group):
        if not isinstance(param, Tensor):
            raise TypeError(f"change_parameters takes modules or lists of parameters, but got a {type(param).__name__}")
    if not groups or not groups[0]:
        raise ValueError("change_parameters must be given parameters to change, but got none")
    shapes = [[tuple(param.shape) for param in group] for group in groups]
    for number, other in enumerate(shapes):
        if other != shapes[0]:
            raise ValueError(
                "all lists passed to change_parameters must have the same shapes in the same order, but number "
                f"{number} has {other!s:.200}, and the first {shapes[0]!s:.200}"
            )
    return groups


class HandChanges:
    """Detector of owned rows changed outside updates even though other ranks hold copies of them.

    The detector samples a few elements of each parameter, which is enough to detect averaging and manual weight decay.
    Other changes, such as clipping individual weights, are detected when a pass ends.
    """

    def __init__(self, model: int) -> None:
        self._model = model
        self._looked_at: list[Tensor] = []
        self._seen = torch.empty(0)
        self._found = self._suspected = False

    def adapt(self, optimizer: torch.optim.Optimizer) -> None:
        """Treat the optimizer's steps as updates, and later changes made in its post-step hooks as manual changes."""
        handle = optimizer.register_step_post_hook(lambda *_: self.record())
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    def watch(self, rows: Iterable[Tensor]) -> None:
        """Watch the given rows instead of the previous ones; the current values are the reference for changes."""
        flat = [each.detach().reshape(-1) for each in rows if each.numel()]
        self._looked_at = [each[:: max(1, each.numel() // _LOOKED_AT)] for each in flat]
        self.record()

    def record(self) -> None:
        """Accept the watched rows' current values as the reference, and clear all findings."""
        self._seen, self._found, self._suspected = self._now(), False, False

    def suspect(self) -> None:
        """Request a comparison of rows between their holders before the next update because rows were replaced."""
        self.record()
        self._suspected = True

    @property
    def suspected(self) -> bool:
        """True if rows must be compared between their holders before the next update."""
        return self._suspected or self.found

    @contextmanager
    def served(self) -> Iterator[None]:
        """Accept all changes made within the context, because all holders of copies make the same changes."""
        found = self.found
        yield
        self.record()
        self._found = found

    def _now(self) -> Tensor:
        return torch.cat(self._looked_at) if self._looked_at else torch.empty(0)

    @property
    def found(self) -> bool:
        """True if a watched row has changed since its reference was recorded."""
        now, seen = self._now(), self._seen
        return self._found or not bool(((now == seen) | (now.isnan() & seen.isnan())).all())

    def end(self) -> None:
        """Stop watching, because the group is about to change or rows are being replaced.

        Raises ReplicasDifferError if a change was found that was not made by the holders of copies.
        """
        found = self.found
        self.watch(())
        if found:
            raise ReplicasDifferError(
                f"parameters of model {self._model}, which is sharded, were changed outside its optimizer's step, and "
                f"the group has changed since: the copies of these rows on other workers were not updated. {_HOW}"
            )
