"""A model's trained parameters in flat buffers, to be averaged over the ranks (torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.sync.engine.trainable import Trainable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Flat:
    """A buffer for the parameters of one kind.

    Attributes:
        members: their positions.
        flat: the buffer.
        views: of it, in the shape of each.
    """

    members: tuple[int, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]


class Replica:
    """See the module's text, and ``AveragedModel``, which this is.

    Halves are added up in float32. A buffer whose collective has failed is left to it.

    Args:
        module: the model.
        trainable: its trained parameters.
        context: the run.
    """

    def __init__(self, module: torch.nn.Module, trainable: Trainable, context: Run) -> None:
        self._module = module
        self._trainable = trainable
        self._context = context
        self._laid_out: list[torch.nn.Parameter] = []
        self._flats: list[_Flat] = []
        self._received: list[_Flat] = []

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self._communicator.world_size

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """This rank's parameters."""
        trained = {id(p) for p in self._trainable.params}
        return {name: p for name, p in self._module.named_parameters() if id(p) in trained}

    @property
    def _communicator(self) -> Communicator:
        return self._context.group.communicator

    def mean(self) -> list[torch.Tensor]:
        """See ``AveragedModel``."""
        self._fill()
        group = self._communicator
        if group.world_size > 1:
            try:
                works = [group.gradients.all_reduce(each.flat) for each in self._flats]
                for work in works:
                    group.wait(work)
            except CommunicationFailedError:
                self._laid_out = []
                raise
            for each in self._flats:
                each.flat.div_(group.world_size)
        return _in_order(self._flats)

    def of_partner(self, partners: Sequence[int | None]) -> list[torch.Tensor] | None:
        """See ``AveragedModel``."""
        group = self._communicator
        if group.world_size == 1:
            return None
        self._fill()
        partner = partners[group.rank]
        if not self._received:
            self._received = _like(self._flats)
        try:
            works = []
            for own, theirs in zip(self._flats, self._received, strict=True):
                # A rank that rests takes part as well: what is sent and received one to one cannot be called off.
                splits = [own.flat.numel() if rank == partner else 0 for rank in range(group.world_size)]
                size = sum(splits)
                works.append(group.gradients.all_to_all(theirs.flat[:size], own.flat[:size], splits, splits))
            for work in works:
                group.wait(work)
        except CommunicationFailedError:
            self._laid_out = []
            raise
        return None if partner is None else _in_order(self._received)

    @torch.no_grad()
    def _fill(self) -> None:
        """The present parameters into buffers."""
        params = list(self.named.values())
        if len(params) != len(self._laid_out) or any(a is not b for a, b in zip(params, self._laid_out, strict=True)):
            self._laid_out = params  # type: ignore[assignment]
            self._flats, self._received = _lay_out(params), []
        for each in self._flats:
            torch._foreach_copy_(list(each.views), [params[i] for i in each.members])


def _lay_out(params: Sequence[torch.Tensor]) -> list[_Flat]:
    """A buffer for each kind of parameters."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, p in enumerate(params):
        kinds.setdefault((torch.promote_types(p.dtype, torch.float32), p.device), []).append(index)
    made = []
    for (dtype, device), members in kinds.items():
        sizes = [params[i].numel() for i in members]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        views = [v.view(params[i].shape) for i, v in zip(members, torch.split(flat, sizes), strict=True)]
        made.append(_Flat(members=tuple(members), flat=flat, views=tuple(views)))
    return made


def _like(flats: Sequence[_Flat]) -> list[_Flat]:
    """Buffers of the same layout."""
    made = []
    for each in flats:
        flat = torch.zeros_like(each.flat)
        pieces = torch.split(flat, [view.numel() for view in each.views])
        views = tuple(piece.view(view.shape) for piece, view in zip(pieces, each.views, strict=True))
        made.append(_Flat(members=each.members, flat=flat, views=views))
    return made


def _in_order(flats: Sequence[_Flat]) -> list[torch.Tensor]:
    """The views of all buffers, in the parameters' order."""
    found = {index: view for each in flats for index, view in zip(each.members, each.views, strict=True)}
    return [found[index] for index in sorted(found)]
