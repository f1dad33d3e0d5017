"""Sample order of an epoch, identical on every rank and computed only from the seed and the epoch.

Map-style datasets: an `EpochOrder` gives an epoch's indices (`order_for` chooses it), and `sharding` divides them by
position. Iterable datasets: `StreamSharder` reads the entire stream on every rank and keeps the rank's share by
position.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from elastic_ray.data import sharding
from elastic_ray.data.private_random import PrivateRandom
from elastic_ray.data.sharding import Indices, Order, Permutation, Shares

Item = TypeVar("Item")

# What is looked at of an item to tell it from others.
_FIRST, _LONGEST, _DEEPEST = 8, 256, 4
_COMPARED = 1024  # indices of an order, from the first on


@runtime_checkable
class EpochOrder(Protocol):
    """Protocol for objects that provide each epoch's sample order, such as the dataset `ArrowDataset`."""

    def epoch_order(self, seed: int, epoch: int) -> Order:
        """Return an epoch's sample indices [n] in the order of use; the same in every process for equal arguments."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOrder:
    """Order of the indices 0..samples-1, shuffled or ascending."""

    samples: int  # length of the dataset, >= 1
    shuffle: bool = True  # a new permutation for each epoch; otherwise ascending
    own_seed: int | None = None  # used instead of the job's seed where the user has set one with a sampler

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"the dataset must have at least 1 sample, but has {self.samples}")

    def epoch_order(self, seed: int, epoch: int) -> Permutation:
        """Return an epoch's sample indices in the order of use; see `EpochOrder`."""
        chosen = seed if self.own_seed is None else self.own_seed
        key = sharding.epoch_key(seed=chosen, epoch=epoch)
        return Permutation(samples=self.samples, key=key if self.shuffle else "")


class SamplerOrder:
    """Order given by a sampler or any re-iterable of indices: weighted, with replacement, a subset...

    At each epoch, `set_epoch(epoch)` is called if the sampler has this method, and the sampler is read completely.
    During the read, every random generator that it can use (torch's on the CPU, NumPy's, Python's, and its own, such as
    an attribute `generator`) is seeded from the job's seed and the epoch; afterwards it is restored. The sampler
    therefore gives the same indices on every rank, and to a worker that joins in a later epoch. A seed that the user
    sets on any of these generators has no effect. The epoch's samples are exactly the indices the sampler yields, and
    "exactly once" applies to positions in its sequence.
    """

    def __init__(self, sampler: Iterable[Any], *, samples: int) -> None:
        """Wrap `sampler` for a dataset of `samples` samples.

        Raises TypeError if the sampler is not re-iterable, or would give each rank a different order.
        """
        if not isinstance(sampler, Iterable):
            raise TypeError(f"sampler must be iterable, but got {type(sampler).__name__}")
        if isinstance(sampler, Iterator):
            raise TypeError(
                "sampler must be an iterable that each epoch can read again (a list, a torch Sampler), "
                f"but got the one-time iterator {type(sampler).__name__}"
            )
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            raise TypeError(
                f"{type(sampler).__name__} cuts the order up among a fixed number of ranks; pass "
                "the sampler of the whole order: elastic_ray shares it out, whatever the size of the group"
            )
        self._sampler, self._samples = sampler, samples

    def epoch_order(self, seed: int, epoch: int) -> Indices:
        """Return an epoch's sample indices in the order of use; see `EpochOrder`.

        Raises ValueError or TypeError if the sampler yields nothing, too much, or values that are not indices of the
        dataset.
        """
        _set_epoch(self._sampler, epoch)
        with PrivateRandom(seed=seed, epoch=epoch, owner=self._sampler):
            # without an end of its own a sampler would fill the memory before anyone sees why
            limit = max(100 * self._samples, 10_000_000)
            drawn = itertools.islice(iter(self._sampler), limit + 1)
            order = np.fromiter((self._index(item) for item in drawn), dtype=np.int64)
        if not 1 <= len(order) <= limit:
            got = len(order) or "none"
            raise ValueError(f"a sampler must give 1..{limit} indices, but {self._name} gave {got}")
        check_indices(order, self._samples, self._sampler)
        return order

    @property
    def _name(self) -> str:
        return type(self._sampler).__name__

    def _index(self, item: Any) -> int:
        try:
            return operator.index(item)
        except TypeError:
            raise TypeError(
                f"a sampler must give integers, but {self._name} gave {item!r}, a {type(item).__name__}; "
                "a batch sampler cannot be used, because the batch size changes: pass the sampler inside it"
            ) from None


def check_indices(order: Indices, samples: int, sampler: object) -> None:
    """Raise ValueError unless all indices from a sampler are valid for the dataset."""
    if order.min() < 0 or order.max() >= samples:
        raise ValueError(
            f"indices must be in 0..{samples - 1}, the samples of the dataset, but {type(sampler).__name__} gave "
            f"{order.min()}..{order.max()}"
        )


def order_for(dataset: Any, *, shuffle: bool = True, sampler: Iterable[Any] | None = None) -> EpochOrder:
    """Return the rule that orders the samples of a map-style `dataset` in each epoch.

    If a sampler is given, it alone decides and `shuffle` is ignored. Only `shuffle` and `seed` of torch's
    DistributedSampler are used, not its sharding and padding (see also `drops_last`). Without a sampler, `shuffle`
    selects the dataset's own order if it has one, or else a permutation; unshuffled indices ascend.

    Raises:
        ValueError: the dataset is empty, or a DistributedSampler belongs to a dataset of a different length.
        TypeError: the dataset has no length, or each rank would read the sampler differently.
    """
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"a dataset must have a length, but {type(dataset).__name__} has no __len__")
    samples = len(dataset)
    plain = IndexOrder(samples=samples, shuffle=shuffle)
    if _is_plain_distributed(sampler):
        distributed = cast("DistributedSampler[Any]", sampler)
        if len(cast("Any", distributed.dataset)) != samples:
            raise ValueError(
                f"the DistributedSampler must be over the loader's dataset of {samples} samples, "
                f"but its dataset has {len(cast('Any', distributed.dataset))}"
            )
        return IndexOrder(samples=samples, shuffle=distributed.shuffle, own_seed=distributed.seed)
    if sampler is not None:
        return SamplerOrder(sampler, samples=samples)
    if shuffle and isinstance(dataset, EpochOrder):
        return dataset
    return plain


def drops_last(sampler: Iterable[Any] | None, *, drop_last: bool) -> bool:
    """True if the loader or a DistributedSampler drops an epoch's last samples when they are fewer than a batch."""
    return drop_last or (_is_plain_distributed(sampler) and bool(cast("Any", sampler).drop_last))


def digest(order: Order) -> int:
    """Return a number below 2**63 computed from an order; ranks compare these numbers to detect differing samplers.

    All indices of an array are included, but only some of an order that is computed on demand.
    """
    if not isinstance(order, np.ndarray):
        order = order[np.arange(0, len(order), -(-len(order) // _COMPARED))]
    raw = hashlib.blake2b(np.ascontiguousarray(order, dtype="<i8").data, digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStep(Generic[Item]):
    """One rank's items of a global batch from a stream, in one list per micro-step."""

    items: list[list[Item]]  # this rank's items, one list per micro-step, none empty
    count: int  # items in the global batch, over all ranks
    tag: int = 0  # of its first item; the same on all ranks


class StreamSharder(Generic[Item]):
    """Division of a stream (an IterableDataset) by position, so that resizes neither lose nor repeat an item.

    Every rank reads the entire stream and keeps the items in its own share, so the stream must be the same on every
    rank: it must not shard itself by rank or by DataLoader worker. It is read in the training process, in one thread
    (num_workers = 0). Random numbers from torch's, NumPy's and Python's global generators are private to the stream,
    seeded from the seed and the epoch. `set_epoch(epoch)` is called if the stream has this method.

    The length is known only once the stream has ended. Each rank therefore reads two `world_size` items beyond the
    current step, and all ranks agree on the tail by counting. A drawn step stays in memory until `commit`; calling
    `next_step` again before that draws the same items, even for a different world size. At most one global batch plus
    two `world_size` raw items are held on each rank. A worker that joins, or a job that restarts, reads and discards
    `position` items: this is exact, but as slow as the stream.
    """

    def __init__(self, source: Iterable[Item], *, seed: int, epoch: int = 0, position: int = 0) -> None:
        """Open `source` at `position` of `epoch`."""
        if isinstance(source, Iterator):
            raise TypeError(
                "a stream must be an iterable that each epoch can read again, but got the one-time iterator "
                f"{type(source).__name__}"
            )
        self._source, self._seed = source, seed
        self.start_epoch(epoch, position=position)

    @property
    def total(self) -> int | None:
        """Number of items in this epoch's stream; None until the stream has ended."""
        return self.position + len(self._ahead) if self._ended else None

    def start_epoch(self, epoch: int, *, position: int = 0) -> None:
        """Open the stream for `epoch` and skip to `position`. Raises ValueError if the stream ends before that."""
        self._epoch = epoch
        self._random = PrivateRandom(seed=self._seed, epoch=epoch)
        self._ahead: deque[Item] = deque()
        self.position = self._drawn = 0
        self._ended = False
        with self._random:
            _set_epoch(self._source, epoch)
            self._items = iter(self._source)
        self._skip(position)

    def seek(self, position: int) -> None:
        """Move to `position` and discard a drawn step: forwards by skipping items, backwards by reopening."""
        if position < self.position:
            self.start_epoch(self._epoch, position=position)
        else:
            self._skip(position)

    def can_switch(self, world_size: int) -> bool:
        """True if `world_size` workers may start at the current position; see `sharding.can_switch`."""
        self._read_ahead(2 * world_size)
        total = self.position + len(self._ahead)
        return sharding.can_switch(position=self.position, total=total, world_size=world_size)

    def next_step(
        self,
        *,
        batch_size: int,
        world_size: int,
        rank: int,
        micro_steps: int | Callable[[int], int] = 1,
        drop_last: bool = False,
        shares: Shares | None = None,
        least: int = 1,
        owed: int = 0,
    ) -> StreamStep[Item] | None:
        """Draw the step at `position`, and return this rank's items from it; None after the epoch's last step.

        If `owed` is not 0, the step has that size; otherwise `sharding.step_size` determines it. `micro_steps` may be a
        function of the size.

        Raises ValueError if an argument is invalid, or the stream is empty.
        """
        self._read_ahead(max(batch_size, owed) + 2 * world_size)
        known = self.position + len(self._ahead)
        if known == 0:
            raise ValueError(f"a stream must have at least 1 item, but {type(self._source).__name__} gave none")
        count = owed or sharding.step_size(
            # with a full look-ahead `known` is not the total, but no tail is near, so the answer is the same
            position=self.position,
            total=known,
            batch_size=batch_size,
            world_size=world_size,
            drop_last=drop_last,
            least=least,
        )
        self._drawn = count
        if count == 0:
            return None
        micros = micro_steps(count) if callable(micro_steps) else micro_steps
        pieces = sharding.rank_slices(
            count, rank=rank, world_size=world_size, micro_steps=micros, shares=shares, least=least
        )
        items = [list(itertools.islice(self._ahead, piece.start, piece.stop)) for piece in pieces]
        return StreamStep(items=items, count=count, tag=item_tag(self._ahead[0]))

    def commit(self) -> int:
        """Mark the drawn step's items as used, and release them; return the new position."""
        self._drop(self._drawn)
        self._drawn = 0
        return self.position

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._ahead.popleft()
        self.position += count

    def _skip(self, position: int) -> None:
        """Read and discard items up to ``position``."""
        self._drawn = 0
        while self.position < position:
            self._read_ahead(min(position - self.position, 1024))
            if not self._ahead:
                raise ValueError(
                    f"the stream must yield the same items on every rank and after a restart, but ended after "
                    f"{self.position} of the {position} items that have been used: leave out a division by rank in "
                    "its __iter__, as the loader divides the items"
                )
            self._drop(min(len(self._ahead), position - self.position))

    def _read_ahead(self, count: int) -> None:
        missing = count - len(self._ahead)
        if missing <= 0 or self._ended:
            return
        with self._random:
            self._ahead.extend(itertools.islice(self._items, missing))
        self._ended = len(self._ahead) < count


def item_tag(item: Any) -> int:
    """Return a number of 1 or more, computed from an item's first values, that lets ranks compare items cheaply."""
    return zlib.crc32(repr(_beginning(item)).encode()) + 1


def _beginning(item: Any, depth: int = 0) -> Any:
    """Return the first values of an item as plain Python values."""
    if isinstance(item, Mapping) and depth < _DEEPEST:
        return [(str(key)[:_LONGEST], _beginning(item[key], depth + 1)) for key in itertools.islice(item, _FIRST)]
    if isinstance(item, (list, tuple)) and depth < _DEEPEST:
        return len(item), [_beginning(each, depth + 1) for each in item[:_FIRST]]
    if isinstance(item, np.ndarray) or (isinstance(item, torch.Tensor) and item.layout == torch.strided):
        on_gpu = isinstance(item, torch.Tensor) and item.is_cuda  # its values would have to be waited for
        return tuple(item.shape), [] if on_gpu else item.reshape(-1)[:_FIRST].tolist()
    if isinstance(item, (str, bytes)):
        return len(item), item[:_LONGEST]
    return item if item is None or isinstance(item, (bool, int, float)) else type(item).__name__


def _is_plain_distributed(sampler: object) -> bool:
    # a subclass with its own order cannot be taken apart; SamplerOrder refuses it and says why
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__


def _set_epoch(target: object, epoch: int) -> None:
    set_epoch = getattr(target, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    for theirs in getattr(target, "pipeline", None) or ():  # of webdataset, whose detshuffle counts its own passes
        if isinstance(getattr(theirs, "epoch", None), int):
            theirs.epoch = epoch - 1
