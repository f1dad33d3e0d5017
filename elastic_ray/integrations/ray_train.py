"""Wrappers that ``ray.train.torch.prepare_model`` and ``prepare_data_loader`` return in an elastic job."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.data.arguments import LoaderArguments, copied_arguments
from elastic_ray.integrations.late_wrapping import LateWrapped, LoaderOnDevice
from elastic_ray.loop.api import current_session, get_context
from elastic_ray.run.registry import HookPoint
from elastic_ray.session.session import Session


# Such a loop, over a plain `range`, runs from its beginning in every worker. A worker that joins later thus comes by
# the earlier passes, too: there it gets a single batch, so that what the loop's body sets is set, and nothing that
# the code does counts. It does so alone, before it joins, as far as it knows where the others are; and for what is
# left after it has joined.
class PassEpochs:
    """Epoch counter for a train function that declares none; each pass over its first prepared loader is one."""

    def __init__(self, session: Session) -> None:
        self._run = weakref.ref(session)
        self._models: list[torch.nn.Module] = []
        self._first: weakref.ref[Any] | None = None
        self._declared = False  # the code uses remaining_epochs_until
        self._passes = 0  # over the first loader that the code has come to
        self._goes_by = self._within = False

    @property
    def _session(self) -> Session:
        session = self._run()
        assert session is not None, "its code runs"
        return session

    def add_model(self, module: torch.nn.Module) -> None:
        """Register a model whose buffers and gradients :meth:`rehearsal` must restore."""
        self._models.append(module)

    def start_pass(self, loader: object) -> bool:
        """Start a pass over a loader; return True if it must be skipped because the other workers have finished it.

        Raises:
            WorkerDismissed, UnsafeStateError: As in :meth:`Session.sync_point`.
            RuntimeError: The job resumes from a checkpoint, but the train function has not called ``get_checkpoint()``.
            CommunicationFailedError: This worker's code is ahead of the other workers'; another worker replaces it.
        """
        if self._first is None:
            self._declared = self._session.in_epochs
        if self._declared:
            return False
        if self._first is None or self._first() is None:  # or the code makes its loaders anew in each epoch
            self._first = weakref.ref(loader)
        if self._first() is loader:
            self._goes_by = self._precedes(self._passes)
            self._passes += 1
            if not self._goes_by:
                self._end_epoch()
                self._within = True
                self._session.ledger.start_epoch()
        return self._goes_by

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Return a context for running the loop body without effect: it restores buffers and clears gradients."""
        kept = [(buffer, buffer.clone()) for module in self._models for buffer in module.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)
            for module in self._models:
                module.zero_grad()

    def _precedes(self, number: int) -> bool:
        """True if the other workers have finished pass `number`; joins the job if that is unknown."""
        session = self._session
        if not session.synced:
            if number < session.start.epochs_behind:
                session.ledger.start_replay(between_epochs=True)
                return True
            self._join(session.start.first_epoch())
        here = session.start.first_epoch() + number
        if here < session.progress.epoch:
            session.ledger.start_replay(between_epochs=True)
            return True
        if here > session.progress.epoch and not self._within:
            raise CommunicationFailedError(
                f"the train function began with epoch {here}, while the others are in epoch {session.progress.epoch}"
            )
        return False

    def _join(self, first: int) -> None:
        """Join the job, and arrange for the last epoch to end when the train function returns."""
        session = self._session
        if get_context().get_world_rank() == 0:
            logger.info(
                "the train function counts its epochs by itself: each pass over its first loader is one, from %d on; "
                "workers that join later get one batch of each earlier pass, for what the loop's body sets",
                first,
            )
        session.start_epochs(None)
        session.registry.add_hook(HookPoint.BEFORE_END, self._end_epoch)

    def _end_epoch(self) -> None:
        """End the epoch, because the code has reached the next one or its end."""
        if self._within:
            self._within = False
            self._session.passes.end_epoch()
            self._session.ledger.start_epoch()


_epochs: weakref.WeakKeyDictionary[Session, PassEpochs] = weakref.WeakKeyDictionary()


def epochs_of(session: Session) -> PassEpochs:
    """Return the epoch counter of a run, creating it on first use."""
    return _epochs.setdefault(session, PassEpochs(session))


logger = logging.getLogger(__name__)
_OF_DDP = ("device_ids", "output_device")  # what Ray passes of its own
_WAY_OUT = (
    "wrap the model yourself: elastic_ray.AdaptiveDataParallel(model, optimizer, lr_scheduler=..., grad_scaler=...)"
)


def check(function: str, given: Mapping[str, Any]) -> None:
    """Raise RuntimeError if an elastic job does not support the arguments given to Ray Train's ``function``."""
    if function == "prepare_model" and given.get("parallel_strategy") not in ("ddp", None):
        raise RuntimeError(
            f"prepare_model(parallel_strategy={given['parallel_strategy']!r}) is not supported in an elastic job, "
            "where each worker holds the whole model: leave it out"
        )
    if function == "prepare_data_loader" and not given.get("move_to_device", True):
        raise RuntimeError(
            "prepare_data_loader(move_to_device=False) is not supported in an elastic job: leave it out, or pass the "
            "DataLoader to elastic_ray.AdaptiveDataLoader"
        )


def model(module: torch.nn.Module, **options: Any) -> RayTrainModel:
    """Return the model for ``prepare_model`` to hand to the user; DDP's device-related ``options`` are ignored."""
    return RayTrainModel(module, {name: value for name, value in options.items() if name not in _OF_DDP})


def loader(data_loader: DataLoader[Any], device: torch.device, auto_transfer: bool = True) -> RayTrainLoader:
    """Return the loader that ``prepare_data_loader`` hands to the user; ``auto_transfer`` has no effect."""
    return RayTrainLoader(data_loader, device)


class RayTrainModel(LateWrapped):
    """Model that is wrapped with its optimizer when the first epoch starts."""

    def __init__(self, module: torch.nn.Module, options: dict[str, Any]) -> None:
        super().__init__(module)
        self._options = options
        session = current_session()
        if session.synced:
            raise RuntimeError(
                "prepare_model() must be called before the first epoch, so that all workers have the model"
            )
        session.registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, self.wrap)
        epochs_of(session).add_model(module)

    def make_wrapper(self) -> er.AdaptiveDataParallel:
        """Return the model wrapped with its optimizers, which the script has created before the first epoch."""
        optimizers = _optimizers_of(self.module)
        schedulers = [scheduler for each in optimizers for scheduler in _schedulers_of(each)]
        return er.AdaptiveDataParallel(
            self.module, optimizers, lr_scheduler=schedulers, grad_scaler=_scaler(), **self._options
        )


class RayTrainLoader(LoaderOnDevice):
    """Loader on the worker's device whose global batch is the user's batch size x the job's largest worker count."""

    def __init__(self, data_loader: DataLoader[Any], device: torch.device) -> None:
        if data_loader.batch_size is None:
            raise RuntimeError(
                "prepare_data_loader() of a DataLoader with a batch_sampler is not supported in an elastic job, which "
                "cuts batches by itself: give it batch_size, and a sampler if need be"
            )
        workers = current_session().group.most_workers
        given = copied_arguments(LoaderArguments(dataset=data_loader), batch_size=data_loader.batch_size * workers)
        super().__init__(er.AdaptiveDataLoader(**given.keywords()), device)
        vars(self)["sampler"] = _Sampler(self.loader.sampler)
        self._given = data_loader
        if get_context().get_world_rank() == 0:
            logger.info(
                "a step takes %d samples, as %d workers of %d would, however many there are",
                self.loader.batch_size,
                workers,
                data_loader.batch_size,
            )

    def __iter__(self) -> Any:
        session = current_session()
        epochs, replays = epochs_of(session), True
        if not epochs.start_pass(self):
            # A worker that came after the last step would run code after the loop without having run the loop's body.
            for batch in self.loader.batches(joined_later=True):
                replays = False
                yield _moved(batch, self.device)
            replays = replays and session.ledger.replays_passes
        if replays:
            with epochs.rehearsal():
                given, own = self._given, torch.Generator()  # else it would draw from torch's
                one = DataLoader(given.dataset, given.batch_size, collate_fn=given.collate_fn, generator=own)
                yield from (_moved(batch, self.device) for batch in itertools.islice(one, 1))


class _Sampler:
    """Sampler of a prepared loader; its ``set_epoch`` does nothing, because the loader knows the epoch."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because the loader knows the epoch."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


def _moved(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device, including those nested in lists, tuples and dicts."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _moved(each, device) for key, each in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [_moved(each, device) for each in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def _objects(*kinds: type) -> list[Any]:
    """Return all live objects of these types in this process; called once, when the first epoch starts."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]


def _optimizers_of(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update the model; raise RuntimeError if none exists."""
    own = {id(p) for p in module.parameters()}
    found = [
        each
        for each in _objects(torch.optim.Optimizer)
        if any(id(p) in own for group in each.param_groups for p in group["params"])
    ]
    if found:
        return found
    raise RuntimeError(
        "prepare_model() needs an optimizer for the model when the first epoch begins, but there is none: make it "
        f"before the loop over epochs, or {_WAY_OUT}"
    )


def _schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return an optimizer's schedulers, without those nested in another scheduler."""
    kinds = torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
    found = [each for each in _objects(*kinds) if getattr(each, "optimizer", None) is optimizer]
    inner = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    return [each for each in found if id(each) not in inner]


def _scaler() -> Any:
    """Return the process's enabled AMP gradient scaler, or None if there is none."""
    found = [each for each in _objects(torch.amp.GradScaler) if each.is_enabled()]
    if len(found) > 1:
        raise RuntimeError(
            f"prepare_model() cannot tell which GradScaler is the model's, for this process holds {len(found)}: let "
            f"go of those that an earlier part of the script has left, or {_WAY_OUT}"
        )
    return found[0] if found else None
