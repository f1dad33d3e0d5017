"""Synchronisation and rollback of a model's buffers (BatchNorm statistics), which have no gradients."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.communication.communicator import Communicator

if TYPE_CHECKING:
    from elastic_ray.steps.step import LoaderStep


_SAMPLE = 64  # elements of a tensor


class BufferSync:
    """Synchroniser for a module's buffers: floating-point buffers are averaged, others are copied from rank 0."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each buffer, in the module's order, which must be the same on all ranks."""
        return [(str(b.dtype), tuple(b.shape)) for b in self._module.buffers()]

    @torch.no_grad()
    def __call__(self, communicator: Communicator) -> None:
        """Synchronise the buffers; all ranks must call this at the same point.

        Raises CommunicationFailedError if the group broke; the buffers are then unchanged.
        """
        if communicator.world_size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for b in self._module.buffers():
            if b.numel():
                kinds.setdefault((b.dtype, b.device), []).append(b)
        flats = {kind: torch.cat([b.reshape(-1) for b in members]) for kind, members in kinds.items()}
        with communicator.together():  # workers of a unit may hold unlike buffers
            for (dtype, _), flat in flats.items():
                if dtype.is_floating_point:
                    communicator.wait(communicator.all_reduce(flat))
                    flat /= communicator.world_size
                else:
                    communicator.broadcast(flat, 0)
        for kind, members in kinds.items():
            for b, value in zip(members, torch.split(flats[kind], [b.numel() for b in members]), strict=True):
                b.copy_(value.view(b.shape))


class SavedBuffers:
    """Copy of a module's buffers, made before the forward passes of an update that may be skipped.

    Each rank keeps its own copy, because buffers differ between ranks within a pass.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._step: LoaderStep | None = None

    def save(self, step: LoaderStep | None, *, goes_on: bool) -> None:
        """Copy the buffers, unless a copy was made in this ``step`` or, with ``goes_on``, earlier for this update."""
        if self._saved and (goes_on or step is self._step):
            return
        self._step = step
        self._saved = [(b, b.detach().clone()) for b in self._module.buffers()]

    def discard(self) -> None:
        """Discard the saved buffers, because the update was applied."""
        self._saved = []

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the saved buffers, because the update was skipped."""
        for buffer, before in self._saved:
            if buffer.shape == before.shape:
                buffer.copy_(before)
            else:  # it has grown with its first batch
                buffer.set_(before.clone())  # type: ignore[call-overload]

    def mend(self) -> None:
        """Restore the saved buffers if the module's current buffers contain NaN or infinity."""
        if not all(bool(buffer.isfinite().all()) for buffer, _ in self._saved):
            self.restore()


class WrittenTensors:
    """Tensors that forward passes modify (queues, centres, a teacher's weights), to be restored if a step is lost.

    Normalisation statistics are not restored, because a lost step's passes merely add samples to them. A frozen
    parameter is copied for the first step, and from its first change on. A frozen backbone, which is larger than what
    is trained, is not copied for the first step, so that it is never held twice.
    Torch does not count changes through ``.data``, as made by MoCo and DINO. These are detected by comparing samples of
    the values, at ever longer intervals.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: list[tuple[dict[str, torch.Tensor | None], str]] = []
        for owner in module.modules():
            if not isinstance(owner, torch.nn.modules.batchnorm._NormBase):
                self._places += [(owner._buffers, name) for name in owner._buffers]
            frozen: Any = owner._parameters
            self._places += [(frozen, name) for name, p in frozen.items() if p is not None and not p.requires_grad]
        sizes = [(p.requires_grad, p.numel()) for p in module.parameters()]
        self._copies_first = sum(size for trained, size in sizes if not trained) <= sum(
            size for trained, size in sizes if trained
        )
        self._tentative: set[int] = set()  # frozen parameters that are copied and were not seen to change
        self._known: list[_Written | None] = [None] * len(self._places)
        self._steps = 0
        self._samples: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._uncounted: set[int] = set()  # tensors that have changed while their counters have not

    def __bool__(self) -> bool:
        return bool(self._places)

    def remember(self) -> list[_Written | None]:
        """Return a snapshot of the tensors, for :meth:`roll_back`."""
        self._steps += 1
        if self._steps & (self._steps - 1) == 0 or self._steps == 3:
            self._find_uncounted()
        for number, (holder, name) in enumerate(self._places):
            now, known = holder.get(name), self._known[number]
            if now is None or now.requires_grad or now.is_inference():
                self._known[number] = None
            elif number in self._uncounted or known is None or known.tensor is not now or known.version != now._version:
                first = known is None and isinstance(now, torch.nn.Parameter)
                copied = self._copies_first or not first
                self._known[number] = _Written(now, now._version, now.detach().clone() if copied else None)
                (self._tentative.add if first and copied else self._tentative.discard)(number)
            elif number in self._tentative:
                self._tentative.discard(number)
                self._known[number] = _Written(now, now._version, None)
        return list(self._known)

    @torch.no_grad()
    def roll_back(self, before: list[_Written | None]) -> None:
        """Restore the tensors to ``before``, a snapshot from :meth:`remember`."""
        for (holder, name), known in zip(self._places, before, strict=True):
            if known is None or known.copied is None:
                continue
            if known.version != known.tensor._version or not _same(known.tensor, known.copied):
                if known.tensor.shape == known.copied.shape:
                    known.tensor.copy_(known.copied)
                else:  # it has grown with its first batch, as observers' buffers do
                    known.tensor.set_(known.copied.clone())  # type: ignore[call-overload]
            if name in holder:
                holder[name] = known.tensor

    def _find_uncounted(self) -> None:
        """Compare samples of the tensors with earlier ones, to find changed samples with an unchanged counter."""
        for number, (holder, name) in enumerate(self._places):
            now = holder.get(name)
            if now is None or number in self._uncounted or (sample := _sample(now)) is None:
                continue
            tensor, version, before = self._samples.get(number, (None, 0, sample))
            if tensor is now and version == now._version and not torch.equal(sample, before):
                self._uncounted.add(number)
            self._samples[number] = now, now._version, sample


def _plain(tensor: torch.Tensor) -> bool:
    """True for a tensor with consecutive elements in memory and changes that torch can count."""
    return tensor.layout == torch.strided and not tensor.is_inference() and type(tensor.detach()) is torch.Tensor


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return some elements of a tensor (if divided, of this worker's part); None for other kinds of tensors."""
    own = getattr(tensor, "_local_tensor", tensor)
    return own.detach().reshape(-1)[:: max(1, own.numel() // _SAMPLE)].clone() if _plain(own) else None


def _same(tensor: torch.Tensor, copied: torch.Tensor) -> bool:
    """True if a tensor has the same values as a copy, or is of another kind, whose changes are counted."""
    own, kept = (getattr(each, "_local_tensor", each) for each in (tensor, copied))
    return not _plain(own) or torch.equal(own, kept)


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """Snapshot of a tensor: the tensor, its version counter, and a copy of its values."""

    tensor: torch.Tensor
    version: int
    copied: torch.Tensor | None

    def __deepcopy__(self, memo: Any) -> _Written:
        return self  # a copy of the tensor would take its place in the module, and loops hold the tensor itself
