"""Compression residuals that stay with their ranks when the group, the buckets or the strategy change (torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.batch.device_numbers import real_count, real_shape
from elastic_ray.sync.engine.layout import BucketLayout
from elastic_ray.sync.operations.bucket_operation import GradientBucket
from elastic_ray.sync.operations.compressed import CompressedOperation, Compression
from elastic_ray.sync.operations.residual import Residual
from elastic_ray.sync.profile import ParamInfo

if TYPE_CHECKING:
    from elastic_ray.run.run import Run

_Tensors = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class _Debtor:
    """Bucket with a residual, with parameter names that hold in every layout."""

    bucket: GradientBucket
    names: Sequence[str]
    residual: Residual
    compression: Compression | None  # what has left that out; None where a strategy before has

    @property
    def owes(self) -> bool:
        """True if the residual has any non-zero value."""
        owed = self.residual.owed
        return owed is not None and owed.flat is not None and bool(owed.flat.any())

    @property
    def knows(self) -> bool:
        """True if the sum of all ranks' residuals is known, or if there is nothing to know."""
        return self.residual.folded is not None or (self.compression is None and not self.owes)

    def owed(self) -> torch.Tensor:
        """Return a copy of the residual, without a loss scale."""
        owed = self.residual.owed
        return self.flat({}) if owed is None or owed.flat is None else owed.flat / owed.scale

    def by_name(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a flat tensor into the bucket's parameters, by name and in their shapes."""
        pieces = torch.split(flat, [real_count(p) for p in self.bucket.params])
        return {
            name: piece.view(real_shape(p))
            for name, piece, p in zip(self.names, pieces, self.bucket.params, strict=True)
        }

    def flat(self, by_name: _Tensors) -> torch.Tensor:
        """Join tensors by name into a flat one, zeros where there is none."""
        dtype = torch.promote_types(self.bucket.dtype, torch.float32)
        device = self.bucket.params[0].device
        pieces = []
        for name, param in zip(self.names, self.bucket.params, strict=True):
            piece = by_name.get(name)
            if piece is None or piece.shape != real_shape(param):
                piece = torch.zeros(real_count(param), dtype=dtype)
            pieces.append(piece.reshape(-1).to(device, dtype))
        return torch.cat(pieces)

    def factors(self) -> dict[str, torch.Tensor]:
        """Return factors of the bucket's compression, by parameter name."""
        known = self.compression.factors() if self.compression is not None else {}
        return {self.names[place]: each for place, each in known.items()}

    def is_among(self, tensors: _Tensors) -> bool:
        """True if `tensors` holds an entry for one of the bucket's parameters."""
        return not tensors.keys().isdisjoint(self.names)

    def take(self, owed: _Tensors, folded: _Tensors, factors: _Tensors) -> None:
        """Continue from these."""
        self.residual.become(self.flat(owed) if self.is_among(owed) else None)
        if self.is_among(folded):
            self.residual.fold(self.flat(folded))
        if self.compression is not None:
            self.compression.take_factors(
                {place: factors[name] for place, name in enumerate(self.names) if name in factors}
            )


class OwedGradients:
    """Compression residuals of one model on this rank; see ``Residual``.

    Kept is the *sum* over ranks, for contributions are weighted by samples and summed. Before a planned change all
    ranks add up what they owe, and each rank of the next group begins with an equal part. A rank that dies takes its
    own with it, and so does one that was behind and takes over another's state: that is told. Where the next strategy
    does not compress, each rank adds its own to the first step that counts.
    """

    def __init__(self, context: Run) -> None:
        self._context = context
        self._debtors: list[_Debtor] = []
        self._settling: list[_Debtor] = []  # which owe until a step has sent it, perhaps on some ranks only
        self._plain: dict[int, _Debtor] = {}  # of buckets that nothing compresses, the ones that could be such
        self._layout: BucketLayout | None = None
        self._members = 0  # ranks of the group that owes, or would under another strategy
        self._holds = True  # not taken over from another rank

    def follow(self, layout: BucketLayout, places: Sequence[Sequence[int]], params: Sequence[ParamInfo]) -> None:
        """Move residuals and factors to other buckets, by parameter.

        Args:
            places: of each bucket's parameters in ``params``.
            params: those of the model.
        """
        owed: dict[str, torch.Tensor] = {}
        folded: dict[str, torch.Tensor] = {}
        factors: dict[str, torch.Tensor] = {}
        for each in self._all:
            factors |= each.factors()
            if each.owes:
                owed |= each.by_name(each.owed())
            if each.residual.folded is not None:
                folded |= each.by_name(each.residual.folded)
        self._debtors, self._settling, self._plain, self._layout = [], [], {}, layout
        for index, (bucket, mine) in enumerate(zip(layout.buckets, places, strict=True)):
            operation, names = layout.operations[index], [params[place].name for place in mine]
            if isinstance(operation, CompressedOperation):
                self._debtors.append(_Debtor(bucket, names, operation.residual, operation.compression))
            else:
                self._plain[index] = _Debtor(bucket, names, Residual(), None)
        self._take(owed, folded, factors)

    @property
    def _all(self) -> Sequence[_Debtor]:
        return (*self._debtors, *self._settling)

    def _take(self, owed: _Tensors, folded: _Tensors, factors: _Tensors) -> None:
        """Continue from these."""
        for index, each in list(self._plain.items()):
            if each.is_among(owed) or each.is_among(folded):
                self._settle(index)
        for each in self._all:
            each.take(owed, folded, factors)

    def _settle(self, index: int) -> None:
        """Let a bucket without compression send its residual, once that is known."""
        assert self._layout is not None, "buckets are laid out"
        residual = self._layout.settle_first(index).residual
        self._settling.append(dataclasses.replace(self._plain.pop(index), residual=residual))

    def before_change(self) -> None:
        """Add up over all ranks what is owed.

        Raises CommunicationFailedError: the group broke; each rank still has its own.
        """
        communicator, several = self._context.group.communicator, self._context.group.world_size > 1
        settles = int(any(each.owes for each in self._settling))
        if several:
            settles = sum(row[0] for row in communicator.gather_ints([settles], with_gradients=True))
        if settles:  # on other ranks, perhaps, in other buckets
            for index in list(self._plain):
                self._settle(index)
            self._settling.sort(key=lambda each: each.bucket.index)
        owing = self._all if settles else self._debtors
        sums = [each.owed() for each in owing]
        if several:
            for work in [communicator.gradients.all_reduce(total) for total in sums]:
                communicator.wait(work)
        for each, total in zip(owing, sums, strict=True):
            each.residual.fold(total)

    def enter_group(self) -> None:
        """Enter a group: start with an equal part of the sum, or continue with the own residual if that is unknown.

        All ranks tell what they know, whether they owe or not: of those that come from another group, some may have
        begun with a strategy that compresses, and others not yet.

        Raises CommunicationFailedError: the group broke again.
        """
        world_size = self._context.group.world_size
        owes = any(each.owes for each in self._all)
        known = all(each.knows for each in self._all)
        row = [int(known), int(self._holds), int(owes), self._members]
        rows = self._context.group.communicator.gather_ints(row) if world_size > 1 else [row]
        if all(row[0] for row in rows):
            for each in self._all:
                each.residual.share(world_size)
        elif any(row[2] for row in rows):
            self._tell_lost(max(row[3] for row in rows) - sum(row[1] for row in rows))
        self._members, self._holds = world_size, True

    def _tell_lost(self, workers: int) -> None:
        """Warn that the residuals of some workers are lost."""
        if workers > 0:
            whose = "one worker" if workers == 1 else f"{workers} workers"
            self._context.tell(
                "warning",
                f"what compression had left out of the gradients of {whose} is lost with the group: each worker keeps "
                "its own until a later step sends it. Training continues without",
                {"workers": workers},
            )

    def capture(self) -> Any:
        """Return the state shared by all ranks: factors, and the sum of residuals where it was computed."""
        if not self._members or not self._all:
            return {}
        factors: dict[str, torch.Tensor] = {}
        folded: dict[str, torch.Tensor] = {}
        for each in self._all:
            factors |= each.factors()
            if each.residual.folded is not None:
                folded |= each.by_name(each.residual.folded)
        return {"owed": {"members": self._members, "factors": factors, "folded": folded}}

    def restore(self, tree: Any) -> None:
        """Restore a captured state; what this rank has owed itself is part of no state any more."""
        state = tree.get("owed", {})
        self._members, self._holds = state.get("members", 0), False
        self._take({}, state.get("folded", {}), state.get("factors", {}))
