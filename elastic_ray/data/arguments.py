"""Arguments of an ``AdaptiveDataLoader``, given directly or read from a torch DataLoader (torch)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, default_collate

from elastic_ray.batch.tokens import WEIGH, length_of
from elastic_ray.data.private_random import PrivateRandom
from placement.arguments import check_argument_names

_TAKEN_OVER = ("collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
_OF_WORKERS = ("prefetch_factor",)
_LOOKED_AT = 16  # samples that are looked at for how long they are
_SHOWN: dict[str, Any] = {
    "collate_fn": default_collate,
    "pin_memory": False,
    "pin_memory_device": "",
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "in_order": True,
}
"""Further options that a DataLoader shows, with the values that it has when the user sets none."""

_OF_A_SOURCE = ("sampler", "batch_sampler", "num_workers", "persistent_workers")
_FIXED = frozenset({*_SHOWN, *_OF_A_SOURCE, "dataset", "batch_size", "drop_last"})
_LIGHTNINGS = "pl_worker_init_function"  # which seeds a loader's processes, after seed_everything(workers=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderArguments:
    """Arguments of a loader, with the same meaning as in torch's DataLoader, except that ``batch_size`` is global.

    Raises TypeError or ValueError if the arguments are invalid or contradict each other.
    """

    dataset: Any
    batch_size: int = 1
    shuffle: bool | None = None  # None where the user has not said
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    drop_last: bool = False
    num_workers: int = 0
    persistent_workers: bool = False
    whole_batches: bool = False
    # further arguments of ``torch.utils.data.DataLoader``
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {"seed", *inspect.signature(DataLoader).parameters, *(each.name for each in dataclasses.fields(self))}
        check_argument_names("AdaptiveDataLoader", self.options, known - {"options"})
        if self.options.get("generator") is not None:
            raise ValueError(
                "generator cannot be set on an AdaptiveDataLoader: seed and epoch fix the order, so that all "
                "workers share it: pass seed= instead (and a DataLoader without generator)"
            )
        if self.persistent_workers and not self.num_workers:
            raise ValueError("persistent_workers=True needs num_workers > 0, but num_workers is 0")
        if self.sampler is not None and self.shuffle:
            raise ValueError(
                "sampler and shuffle=True exclude each other: the sampler decides the order. Leave shuffle out, or "
                "shuffle within the sampler"
            )
        if self.batch_sampler is not None:
            self._check_batch_sampler()
        if isinstance(self.dataset, IterableDataset):
            self._check_stream()

    def _check_batch_sampler(self) -> None:
        """Raise ValueError if an argument is incompatible with ``batch_sampler``."""
        if not self.whole_batches:
            raise ValueError(
                "batch_sampler cannot be set on an AdaptiveDataLoader that trains: the batch size changes with the "
                "job. Pass batch_size and sampler, or, for evaluation by whole batches, whole_batches=True"
            )
        if self.batch_size != 1 or self.shuffle or self.sampler is not None or self.drop_last:
            raise ValueError(
                "batch_sampler excludes batch_size, shuffle, sampler and drop_last: it decides all of them"
            )

    def _check_stream(self) -> None:
        """Raise ValueError if an argument is incompatible with an iterable dataset."""
        given = {
            "num_workers": self.num_workers,
            "sampler": self.sampler is not None,
            "shuffle=True": self.shuffle,
            "whole_batches=True": self.whole_batches,
        }
        if wrong := [name for name, is_set in given.items() if is_set]:
            raise ValueError(
                f"{wrong[0]} cannot be used with an iterable dataset, whose items are shared out by their position "
                "in the stream; leave it out, or use a map-style dataset"
            )
        # A DataLoader's default values say nothing.
        unknown = sorted(name for name, value in self.options.items() if name != "collate_fn" and value)
        if unknown:
            raise ValueError(f"with an iterable dataset only collate_fn can be set, but got {', '.join(unknown)}")

    def shown(self, name: str) -> Any:
        """Return the value of attribute `name` in a torch DataLoader with these arguments.

        Raises AttributeError if a DataLoader has no such attribute.
        """
        if name == "sampler" and self.sampler is None:
            if isinstance(self.dataset, IterableDataset):
                return None
            return RandomSampler(self.dataset) if self.shuffles else SequentialSampler(self.dataset)
        if name in _SHOWN:
            return self.options.get(name, _SHOWN[name])
        if name in _OF_A_SOURCE:
            return getattr(self, name)
        raise AttributeError(f"'AdaptiveDataLoader' object has no attribute {name!r}")

    def keywords(self) -> dict[str, Any]:
        """Return these arguments as keyword arguments for ``AdaptiveDataLoader``."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own.pop("options"), **own}

    def facts(self, *, drop_last: bool) -> dict[str, Any]:
        """Return the loader settings that must be the same on all ranks, as plain values keyed by name."""
        samplers = {"sampler": self.sampler, "batch_sampler": self.batch_sampler}
        return {
            "drop_last": drop_last,
            "shuffle": self.shuffles and self.sampler is None,
            "whole_batches": self.whole_batches,
            **{name: "none" if value is None else type(value).__qualname__ for name, value in samplers.items()},
        }

    @property
    def draws(self) -> bool:
        """True if the order of samples depends on the seed."""
        unordered = self.shuffles or self.sampler is not None or self.batch_sampler is not None
        return unordered or isinstance(self.dataset, IterableDataset)

    @property
    def shuffles(self) -> bool:
        """True if each epoch uses the samples in a new order, which is the default except with ``whole_batches``."""
        return (not self.whole_batches) if self.shuffle is None else self.shuffle


def refuse_change(name: str) -> None:
    """Raise AttributeError if attribute `name` of a loader is one of its arguments, which it has passed on."""
    if name in _FIXED:
        raise AttributeError(
            f"{name} cannot be changed on an AdaptiveDataLoader: make another loader with it, on all workers at the "
            "same place, which may be within the epochs"
        )


class ShownArguments:
    """Loader that has the attributes of a torch DataLoader, which cannot be changed."""

    _given: LoaderArguments

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also of an object that is not made yet
            raise AttributeError(name)
        return self._given.shown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "worker_init_fn" and getattr(getattr(value, "func", None), "__name__", "") == _LIGHTNINGS:
            return  # each sample has its own seed already
        refuse_change(name)
        super().__setattr__(name, value)


def batch_of_worker(given: LoaderArguments, *, plain: bool) -> int:
    """Return the batch size per worker for a loader with ``scale_with_workers``, after checking its arguments.

    Raises ValueError if another argument (a schedule, ``batch_tokens``, ``whole_batches``) decides the batch size.
    """
    if not plain or given.whole_batches:
        other = "whole_batches" if given.whole_batches else "a ramp of batch_size, or batch_tokens"
        raise ValueError(f"scale_with_workers=True needs one batch_size of each worker, but got {other}: leave one out")
    return given.batch_size


def copied_arguments(given: LoaderArguments, batch_size: int | None = None) -> LoaderArguments:
    """Return loader arguments that reproduce the torch DataLoader passed as ``dataset``.

    Args:
        batch_size: global batch size that replaces the DataLoader's own; None keeps the DataLoader's.

    Raises ValueError if the DataLoader's batches cannot be divided between ranks, or if an argument was given that must
    be set on the DataLoader instead.
    """
    loader: DataLoader[Any] = given.dataset
    own = {"dataset", "whole_batches"}
    fields = {field.name: field for field in dataclasses.fields(given)}
    beside = [
        name
        for name, field in fields.items()
        if name not in own and getattr(given, name) not in (field.default, None, {})
    ]
    if beside:
        names = ", ".join(given.options if beside == ["options"] else beside)
        raise ValueError(
            f"{names} cannot be given beside a DataLoader, which has its own: set it there, or pass the DataLoader's "
            "dataset instead"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ValueError(
            "a DataLoader with batch_size=None, whose samples are already batches, cannot be divided among workers: "
            "pass its dataset with batch_size=the number of such items in a global batch, and a collate_fn"
        )
    batches: dict[str, Any] = {"batch_size": batch_size or loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None:
        batches = {"batch_sampler": loader.batch_sampler}
    elif not isinstance(loader.dataset, IterableDataset):
        batches |= _order_of(loader.sampler)
    return LoaderArguments(
        dataset=loader.dataset,
        num_workers=loader.num_workers,
        persistent_workers=loader.persistent_workers,
        whole_batches=given.whole_batches,
        options=_options_of(loader),
        **batches,
    )


def _options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the remaining options that a DataLoader was created with."""
    options = {name: getattr(loader, name) for name in _TAKEN_OVER}
    if options["collate_fn"] is default_collate:
        del options["collate_fn"]
    if loader.num_workers:
        options |= {name: getattr(loader, name) for name in _OF_WORKERS}
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    if not getattr(loader, "in_order", True):
        options["in_order"] = False
    if loader.generator is not None:
        options["generator"] = loader.generator
    return options


def _order_of(sampler: Any) -> dict[str, Any]:
    """Return the order arguments equivalent to a sampler: torch's own two samplers become shuffle=True or False."""
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        if sampler.generator is not None:
            raise ValueError(
                "the DataLoader's sampler has its own generator, but here seed and epoch fix the order: "
                "use shuffle=True, and pass seed= to the AdaptiveDataLoader"
            )
        return {"shuffle": True}
    return {"sampler": sampler}


def describe_sample(dataset: Any) -> str:
    """Describe a dataset's samples as text without loading any, as that may be slow or draw random numbers."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    tensors = getattr(dataset, "tensors", ())
    shapes = [f"{tuple(t.shape[1:])} {t.dtype}" for t in tensors if isinstance(t, torch.Tensor)]
    return " ".join([type(dataset).__qualname__, *shapes])


def first_length(dataset: Any, tokens_per_sample: Any) -> float | None:
    """Return the mean length of a few samples; None if the loop counts no tokens or any sample has no length."""
    if tokens_per_sample != WEIGH or isinstance(dataset, (IterableDataset, DataLoader)):
        return None
    if not isinstance(dataset, Sized):
        return None
    count = len(dataset)
    with PrivateRandom(seed=0, epoch=0, owner=dataset):  # all ranks look at the same samples
        places = sorted({at * count // _LOOKED_AT for at in range(_LOOKED_AT)}) if count else []
        found = [length_of(dataset[place]) for place in places]  # type: ignore[index]
    known = [each for each in found if each]
    return sum(known) / len(known) if known and None not in found else None
