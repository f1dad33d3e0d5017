"""``AdaptiveDataLoader``: a DataLoader whose batches follow the job's size, in order, each sample exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import IterableDataset

from elastic_ray.batch.limits import BatchChoice, BatchLimits, split
from elastic_ray.context import current_session
from elastic_ray.data.feed import Feed, MapFeed, StepCut, StreamFeed
from elastic_ray.data.order import SamplerOrder, drops_last, order_for
from elastic_ray.link import LoaderInfo
from elastic_ray.parallel.signature import describe_sample
from elastic_ray.run_progress import LoopProgress
from elastic_ray.session import Session
from elastic_ray.step import Step

_OWN_ARGUMENTS = {
    "batch_sampler": "the batch size changes with the job: pass batch_size and sampler",
    "persistent_workers": "worker processes always persist while the job changes size",
    "generator": "the order is fixed by seed: pass seed=",
}


class AdaptiveDataLoader:
    """Loads ``dataset`` in global batches that the job's workers share.

    ``batch_size`` is the size of the *global* batch: of 64 samples, each of 4 workers takes 16. Unless
    :meth:`autoscale_batch_size` allows more, every step uses exactly that many (the last one of an epoch fewer),
    whatever the number of workers. In each epoch every sample is used exactly once, in an order that ``seed`` and
    the epoch alone decide, however workers come, go and fail; a step that a failure voids is drawn again.

    Iterate inside ``for epoch in elastic_ray.remaining_epochs_until(n):``; evaluation loaders (``shuffle=False``) share
    their samples among the workers too: add results up in an ``Accumulator``. A loop left by ``break`` ends the pass.

    Samplers: any sampler or iterable of indices decides the order of the whole, seeded by ``seed`` and the epoch;
    a ``DistributedSampler`` is taken apart into its shuffle, seed and drop_last. Iterable datasets: every rank reads
    the whole stream and keeps its share (``num_workers`` must be 0), see ``elastic_ray.data.order.StreamSharder``.

    Args:
        dataset: map-style or iterable; not empty.
        batch_size: global batch size M0, at least 1 and at most the dataset's size.
        shuffle: another order in each epoch; False for evaluation. Ignored where ``sampler`` is given.
        sampler: order of the indices, see above.
        drop_last: leave out a last step smaller than the batch.
        seed: of the order.
        num_workers: DataLoader worker processes; they survive every change of the job's size.
        options: further arguments of ``torch.utils.data.DataLoader`` (``collate_fn``, ``pin_memory``, ...).

    Raises:
        TypeError, ValueError: an argument that cannot be right; the message names it and the way out.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = True,
        *,
        sampler: Iterable[Any] | None = None,
        drop_last: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        for name, reason in _OWN_ARGUMENTS.items():
            if options.pop(name, None) not in (None, True):
                raise ValueError(f"{name} cannot be set on an AdaptiveDataLoader: {reason}")
        self.dataset = dataset
        self._limits = BatchLimits(init_batch_size=batch_size)
        self._drop_last = drops_last(sampler, drop_last=drop_last)
        self._session: Session = current_session()
        self._adaptive = False
        self._passes = 0
        self._reading: tuple[LoopProgress, int] | None = None  # pass and state of the group that the feed is set to
        self._setting: tuple[int, BatchChoice, StepCut] | None = None
        self._samples: int | None = None
        self._feed = self._make_feed(shuffle, sampler, seed, num_workers, options)
        self._announce()

    def _make_feed(self, shuffle: bool, sampler: Any, seed: int, num_workers: int, options: dict[str, Any]) -> Feed:
        if isinstance(self.dataset, IterableDataset):
            if num_workers or sampler is not None:
                name = "num_workers" if num_workers else "sampler"
                raise ValueError(
                    f"{name} cannot be used with an iterable dataset, whose items are shared out by their position "
                    "in the stream; leave it out, or use a map-style dataset"
                )
            unknown = sorted(options.keys() - {"collate_fn"})
            if unknown:
                raise ValueError(f"with an iterable dataset only collate_fn can be set, but got {', '.join(unknown)}")
            return StreamFeed(self.dataset, seed=seed, collate=options.get("collate_fn"))
        order = order_for(self.dataset, shuffle=shuffle, sampler=sampler)
        self._samples = len(self.dataset)
        if isinstance(order, SamplerOrder) and isinstance(sampler, Sized):
            self._samples = len(sampler)  # a weighted sampler draws as often as it was told to
        if self._limits.init_batch_size > self._samples:
            raise ValueError(
                f"batch_size must be at most the {self._samples} samples of an epoch, "
                f"but got {self._limits.init_batch_size}"
            )
        return MapFeed(self.dataset, order, seed=seed, num_workers=num_workers, options=options)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the job choose the global batch between ``batch_size`` and ``max_batch_size`` for its goodput.

        The learning rate follows by the scaling rule of ``AdaptiveDataParallel``.

        Args:
            max_batch_size: largest global batch [samples].
            local_bsz_bounds: least and largest samples that one worker takes at once.
            gradient_accumulation: allow several micro-batches a step; the loop then sees each of them, and
                ``optimizer.step()`` acts on the last.

        Raises:
            RuntimeError: another loader of this loop adapts its batch already, or training has begun.
            ValueError: limits that exclude each other or the batch size.
        """
        session = self._session
        if session.synced:
            raise RuntimeError("autoscale_batch_size must be called before the first epoch")
        if session.loader is not None and not session.loader.limits.fixed:
            raise RuntimeError("only one AdaptiveDataLoader of a train loop may adapt its batch size")
        if self._samples is not None and max_batch_size > self._samples:
            raise ValueError(
                f"max_batch_size must be at most the {self._samples} samples of an epoch, but got {max_batch_size}"
            )
        self._limits = BatchLimits(
            init_batch_size=self._limits.init_batch_size,
            max_batch_size=max_batch_size,
            local_bsz_bounds=local_bsz_bounds,
            gradient_accumulation=gradient_accumulation,
        )
        self._adaptive = True
        self._announce()

    def _announce(self) -> None:
        if self._adaptive or self._session.loader is None:
            self._session.leading_loader = self
            self._session.loader = LoaderInfo(
                limits=self._limits, dataset_size=self._samples, sample=describe_sample(self.dataset)
            )
            self._session.warm_ups.append(self._feed.warm_up)

    # -- sizes -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> BatchChoice:
        """How a full step is cut on each worker now."""
        session, limits = self._session, self._limits
        if session.leading_loader is self and session.shape is not None:
            return session.shape
        return split(
            limits.init_batch_size,
            session.world_size,
            lower=limits.lower,
            upper=limits.upper,
            accumulation=limits.gradient_accumulation,
        )

    @property
    def current_local_bsz(self) -> int:
        """Most samples a worker takes at once now."""
        return self.shape.atomic_bsz

    @property
    def accumulation_steps(self) -> int:
        """Micro-steps before the one that synchronises."""
        return self.shape.accum_steps

    @property
    def current_batch_size(self) -> int:
        """Global batch size now [samples]."""
        return self.shape.batch_size(self._session.world_size) if self._adaptive else self._limits.init_batch_size

    def __len__(self) -> int:
        """Steps of a whole pass at the present batch size.

        Raises:
            TypeError: an iterable dataset has no length.
        """
        if self._samples is None:
            raise TypeError("an AdaptiveDataLoader over an iterable dataset has no length")
        steps, rest = divmod(self._samples, self.current_batch_size)
        return steps + int(rest > 0 and not self._drop_last)

    # -- iteration ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        loop = self._session.enter_loop()
        if loop.done:
            return
        self._reading = None
        epoch = self._epoch()
        try:
            while (batches := self._next_step(epoch, loop)) is not None:
                yield from self._micro_batches(batches)
                if self._session.edge(loop):
                    self._feed.commit()
            total = self._pass_total(loop)
        except GeneratorExit:
            self._session.abandon_step()
            raise
        self._session.end_pass(loop, total)

    def _micro_batches(self, batches: list[Callable[[], Any]]) -> Iterator[Any]:
        step = self._session.step
        assert step is not None, "a step was begun"
        for micro, fetch in enumerate(batches):
            step.micro = micro
            yield fetch()
            if micro < len(batches) - 1:
                self._session.clock.micro()

    def _epoch(self) -> int:
        """Epoch whose order a pass has; a loop without ``remaining_epochs_until`` makes one epoch a pass."""
        if self._session.in_epochs:
            return self._session.progress.epoch
        self._passes += 1
        return self._passes - 1

    def _next_step(self, epoch: int, loop: LoopProgress) -> list[Callable[[], Any]] | None:
        """Cut the step at the pass's position and begin it; None at the end of the pass."""
        session = self._session
        session.check_group()
        shape, cut = self._present_cut()
        # Also after a pass over this very loader that was nested in the last step.
        if self._reading is None or self._reading[0] is not loop or self._reading[1] != session.shape_changes:
            self._feed.begin(epoch, loop.position, cut)
            self._reading = loop, session.shape_changes
        count, total, batches = self._feed.step(epoch, loop.position, cut)
        if count == 0 or loop.done:
            return None
        init_batch_size = self._limits.init_batch_size
        session.begin_step(
            Step(
                loop=loop,
                total=total,
                sizes=cut.sizes(count),
                scale=cut.batch_size / init_batch_size,
                init_batch_size=init_batch_size,
                shape=shape,
                ordinal=session.next_ordinal,
                can_switch=lambda world_size: self._feed.can_switch(loop.position, total, world_size),
            )
        )
        return batches

    def _present_cut(self) -> tuple[BatchChoice, StepCut]:
        """The setting for the next step; it moves with the group and the batch only."""
        session = self._session
        if self._setting is None or self._setting[0] != session.shape_changes:
            shape = self.shape
            cut = StepCut(
                batch_size=self.current_batch_size,
                micro_steps=shape.accum_steps + 1,
                world_size=session.world_size,
                rank=session.rank,
                drop_last=self._drop_last,
            )
            self._setting = session.shape_changes, shape, cut
        return self._setting[1:]

    def _pass_total(self, loop: LoopProgress) -> int:
        return self._samples if self._samples is not None else loop.position
