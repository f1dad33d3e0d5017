"""``AdaptiveDataLoader``: a DataLoader whose batches adapt to the job's size and use each sample exactly once."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from elastic_ray.adaptation.policies.batch_schedule import BatchSchedule
from elastic_ray.batch.growth import read_ramp
from elastic_ray.batch.halving import Halving
from elastic_ray.batch.limits import BatchChoice, BatchLimits, bounded, cut_within
from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.batch.tokens import NOT_COUNTED, WEIGH, TokenBatch, read_token_batch
from elastic_ray.data.arguments import (
    LoaderArguments,
    ShownArguments,
    batch_of_worker,
    copied_arguments,
    describe_sample,
    first_length,
)
from elastic_ray.data.batches import (
    BatchSamplerOrder,
    BatchSource,
    BringsBatches,
    MapBatches,
    StepBatches,
    StepSplit,
    StreamBatches,
    WholeBatches,
)
from elastic_ray.data.compared_items import item_facts, still_facts
from elastic_ray.data.order import EpochOrder, SamplerOrder, drops_last, order_for
from elastic_ray.data.resumable import ResumableLoader
from elastic_ray.data.sharding import Shares, batches_of
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import replaced_error, session_of_thread
from elastic_ray.state.progress import PassProgress
from elastic_ray.steps.step import LoaderStep
from placement.checks import check_whole

if TYPE_CHECKING:
    from elastic_ray.session.session import Session

_Changes: TypeAlias = tuple[int, int, int, int]
_Setting: TypeAlias = tuple[BatchChoice, StepSplit, bool]


class PlanFacts:
    """Loader settings that must be the same on all ranks so that they divide the loader's samples in the same way."""

    def __init__(self, given: LoaderArguments, source: BatchSource, *, seed: int, drop_last: bool) -> None:
        self._options = given.facts(drop_last=drop_last) | ({"seed": seed} if given.draws else {})
        self._source = source
        # Where ranks run the same code; later each may have notes of its own in its dataset, and a joiner has none.
        self._first = item_facts(given.dataset)

    def of(self, epoch: int, limits: BatchLimits) -> dict[str, Any]:
        """Return the settings that apply to one pass over the data, as plain values keyed by name."""
        batch = dataclasses.asdict(limits)
        items = self._source.facts(epoch)
        return {"batch_size": batch.pop("init_batch_size"), **batch, **self._options, **still_facts(items, self._first)}


class AdaptiveDataLoader(ShownArguments, ResumableLoader):
    """DataLoader that divides each global batch between the job's workers.

    ``batch_size`` is the size of the *global* batch: with 64 samples and 4 workers, each worker gets 16. Unless
    :meth:`autoscale_batch_size` allows more, every step uses exactly that many samples (fewer in the last step of an
    epoch), regardless of the number of workers. Every sample is used exactly once per epoch, in an order determined by
    ``seed`` and the epoch alone, even if workers join, leave or fail. A step voided by a failure is drawn again.

    Iterate inside ``for epoch in elastic_ray.remaining_epochs_until(n):``. Evaluation loaders (``shuffle=False``) also
    divide their samples between the workers, so results must be summed in an ``Accumulator``.

    A sampler or iterable of indices determines the global order, seeded by ``seed`` and the epoch. Only the shuffle,
    seed and drop_last options of a ``DistributedSampler`` are used. With an iterable dataset, every rank reads the
    entire stream and keeps its share (``num_workers`` must be 0).

    The DataLoader's worker processes survive every change in the job's size. With ``persistent_workers=True`` they keep
    their copies of the dataset, and ``set_epoch(epoch)`` is called on each copy before the epoch's first sample.

    Args:
        dataset: map-style or iterable dataset, not empty; or a ``torch.utils.data.DataLoader``, whose arguments are
            reused.
        batch_size: global batch size, at least 1; if it is larger than the dataset, each batch holds all samples.
            Alternatively, a schedule by progress (0 to 1), such as ``[(0, 64), (0.1, 256)]``. The first size is the
            initial batch, which the user's learning rates are meant for. Sizes are adapted to the workers: on 3
            workers, 256 becomes 255.
        batch_tokens: global batch in tokens, instead of ``batch_size``, rounded down to complete samples; or a schedule
            by tokens trained on, such as ``[(0, 65_536), ("0.25B", 262_144)]``.
        tokens_per_sample: tokens in each sample; ``"weigh"`` if the loop counts them with :meth:`weigh`.
        scale_with_workers: if True, ``batch_size`` is per worker, so the global batch grows with the job; the scaling
            rule adapts the learning rate, which is meant for one worker.
        max_batch_tokens: largest batch in tokens, as in :meth:`autoscale_batch_size`; None keeps the batch fixed.
        shuffle: use a new order in each epoch; True by default, except with a ``sampler`` or ``whole_batches``.
        sampler: sampler or iterable of indices, in the order they are used; None orders samples by ``shuffle``.
        batch_sampler: yields batches as lists of indices; requires ``whole_batches``.
        drop_last: drop a last step smaller than the batch.
        seed: seed for the sample order.
        num_workers: number of DataLoader worker processes.
        persistent_workers: keep worker processes between passes; ``set_epoch`` is called on their dataset's copies.
        whole_batches: give each batch undivided to one rank, in the dataset's order unless ``shuffle=True``. Meant for
            evaluation metrics that need complete batches, such as a ranking over 100 candidates.
        options: further arguments of ``torch.utils.data.DataLoader``.

    Raises TypeError or ValueError if an argument is invalid; the message names it and says how to fix it.

    Examples:
        >>> from elastic_ray import remaining_epochs_until
        >>> loader = AdaptiveDataLoader([1, 2, 3, 4, 5], batch_size=2, shuffle=False)
        >>> [batch.tolist() for epoch in remaining_epochs_until(1) for batch in loader]
        [[1, 2], [3, 4], [5]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | Sequence[tuple[float, int]] = 1,
        shuffle: bool | None = None,
        *,
        batch_tokens: int | str | Sequence[tuple[int | str, int | str]] | None = None,
        tokens_per_sample: int | str | None = None,
        max_batch_tokens: int | str | None = None,
        scale_with_workers: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        drop_last: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        persistent_workers: bool = False,
        whole_batches: bool = False,
        **options: Any,
    ) -> None:
        check_whole("seed", seed)
        first, ramp = read_ramp(batch_size)
        tokens = read_token_batch(
            batch_tokens, max_batch_tokens, tokens_per_sample, counted_first=first_length(dataset, tokens_per_sample)
        )
        if tokens is not None:
            if batch_size != 1 or batch_sampler is not None or isinstance(dataset, DataLoader):
                raise ValueError(
                    f"batch_tokens={batch_tokens!r} decides the batch, so neither batch_size={batch_size!r} nor a "
                    "batch_sampler nor a DataLoader, which has one of them, can be given beside it: leave one out"
                )
            first = tokens.batch_size
        given = LoaderArguments(
            dataset=dataset,
            batch_size=first,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            whole_batches=whole_batches,
            options=options,
        )
        self._given = given = copied_arguments(given) if isinstance(dataset, DataLoader) else given
        self._limits = BatchLimits(init_batch_size=given.batch_size)
        self._tokens = tokens
        self._counted: tuple[int, int] | None = None  # steps of the run, and samples whose tokens the loop has counted
        self._drop_last = drops_last(given.sampler, drop_last=given.drop_last)
        self._session: Session = current_session()
        self._is_late = False
        self._passes = 0
        self._reading: tuple[PassProgress, _Changes] | None = None  # that the source is set to
        self._setting: tuple[_Changes, BatchChoice, StepSplit, bool] | None = None
        # Users' samplers may draw a sample several times; a stream's total is not known until it ends.
        self._draws_from_all = given.sampler is None and not isinstance(given.dataset, IterableDataset)
        self._source = _source_of(given, seed=seed, drop_last=self._drop_last)
        self._plan = PlanFacts(given, self._source, seed=seed, drop_last=self._drop_last)
        self._announce()
        if scale_with_workers:
            each = batch_of_worker(given, plain=not ramp and tokens is None)
            self.autoscale_batch_size(max(self.dataset_size or each << 20, each), (each, each))
        if ramp:
            self.autoscale_batch_size(max(size for _, size in ramp))
            self._session.add_policies([BatchSchedule(dict(ramp), by="progress")])
        if tokens is not None and tokens.max_batch_size is not None:
            self.autoscale_batch_size(tokens.most_within(self.dataset_size))
            if len(tokens.ramp) > 1:
                self._session.add_policies([BatchSchedule(dict(tokens.ramp), by="tokens")])

    @property
    def dataset_size(self) -> int | None:
        """Current number of samples in a pass (a dataset may change between epochs); None if unknown."""
        given = self._given
        if isinstance(given.dataset, IterableDataset):
            return given.dataset.known_rows if isinstance(given.dataset, BringsBatches) else None
        sampler: Any = given.sampler
        drawn = isinstance(sampler, Sized) and isinstance(_order_of(given), SamplerOrder)
        return len(sampler if drawn else given.dataset)  # a weighted sampler draws as often as it was told to

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the job choose the global batch size, from ``batch_size`` to ``max_batch_size``, to maximise goodput.

        Call this on every worker before training. The scaling rule of ``AdaptiveDataParallel`` adapts the learning
        rate.

        Args:
            max_batch_size: largest global batch [samples].
            local_bsz_bounds: fewest and most samples that one worker processes at once; None if unbounded.
            gradient_accumulation: True if a step may have several micro-batches; ``optimizer.step()`` then has an
                effect only on the last of them.

        Raises:
            RuntimeError: another loader of this train loop already adapts its batch size, training has started, or the
                loader has ``whole_batches`` or ``scale_with_workers``.
            ValueError: the limits contradict each other or the batch size.
        """
        if self._given.whole_batches or self._limits.per_worker:
            what = "of whole batches is for evaluation" if self._given.whole_batches else "has scale_with_workers=True"
            raise RuntimeError(f"a loader {what}: the job does not choose its batch size")
        self.join(session_of_thread() or self._session)
        if self._session.synced and not self._is_late:
            raise RuntimeError("autoscale_batch_size must be called before the first epoch")
        loaders = self._session.registry.loaders
        replaced = not self._session.elastic and loaders.is_left
        known = None if self._leads or self._is_late or replaced else loaders.info
        if known is not None and not known.limits.fixed:
            raise RuntimeError("only one AdaptiveDataLoader of a train loop may adapt its batch size")
        if (samples := self.dataset_size) is not None and max_batch_size > samples:
            raise ValueError(f"max_batch_size must be at most an epoch's {samples} samples, but got {max_batch_size}")
        self._limits = BatchLimits(
            init_batch_size=self._limits.init_batch_size,
            max_batch_size=max_batch_size,
            local_bsz_bounds=local_bsz_bounds,
            gradient_accumulation=gradient_accumulation,
        )
        self._announce()

    @property
    def max_batch_size(self) -> int | None:
        """Largest global batch that the job may choose [samples]; None if the batch size is fixed."""
        return self._limits.max_batch_size

    def weigh(self, count: float) -> None:
        """Weight the current micro-batch by ``count``, instead of its number of samples, in the step's mean gradient.

        Call this before ``backward()``, on every rank, with the number of items that the micro-batch's loss averages
        over: for example the tokens that are not padding, or the boxes in the images. The result is the gradient of the
        mean over all items in the step, no matter how they are distributed over ranks and micro-batches. A micro-batch
        with count 0 does not contribute, whatever its loss is. This costs one small collective per step.

        Args:
            count: number of items, 0 or more.

        Raises:
            TypeError, ValueError: ``count`` is not a finite number of 0 or more.
            RuntimeError: called outside a loop over this loader, twice for one micro-batch, after ``backward()``, or
                after skipping an earlier micro-batch of the same step.
        """
        if isinstance(count, bool) or not isinstance(count, int | float):
            raise TypeError(f"loader.weigh(n) takes a number (of a tensor its .item()), but got {count!r}")
        if not 0 <= count < math.inf:
            raise ValueError(f"loader.weigh(n) takes a number of 0 or more, but got {count}")
        step = self._session.ledger.step
        if step is None or self._reading is None or step.loader_pass is not self._reading[0]:
            raise RuntimeError("loader.weigh(n) is for the body of a loop over this loader, once for each micro-batch")
        step.weigh(float(count))

    def _announce(self) -> None:
        """Register this loader with its session, and make it the leading loader if it has that role."""
        loaders = (session := self._session).registry.loaders
        loaders.add(weakref.WeakMethod(self._source.close))
        self._is_late = session.synced and not session.elastic
        if self._is_late:  # made for another run of this process, or for a last evaluation
            loaders.add_late(weakref.WeakMethod(self.join))
        elif session.synced:
            return
        elif not self._limits.fixed or (
            (loaders.info is None or (loaders.is_left and not session.elastic)) and not self._given.whole_batches
        ):
            self._lead()
        elif (
            self._counts_tokens
            and (known := loaders.info) is not None
            and known.limits.fixed
            and (known.tokens is None or not known.tokens.counted)
        ):
            self._lead()  # only the leading loader's tokens are counted

    @property
    def _counts_tokens(self) -> bool:
        """True if this loader's batch follows the tokens that the loop counts."""
        return self._tokens is not None and self._tokens.counted

    def _lead(self) -> None:
        """Make this loader report for the job."""
        sample, tokens = describe_sample(self.dataset), self._tokens
        info = LoaderInfo(limits=self._limits, dataset_size=self.dataset_size, sample=sample, tokens=tokens)
        self._session.registry.loaders.lead(self, info, in_processes=self._given.num_workers > 0)

    def _recount(self, tokens: TokenBatch) -> None:
        """Convert the batch declared in tokens to samples again, using the tokens counted by the loop so far.

        Raises:
            RuntimeError: the loop has trained a step without counting its tokens, or models are averaged.
        """
        if self._session.registry.drifts:
            raise RuntimeError(
                f"tokens_per_sample={WEIGH!r} cannot be used with strategies that average models, which exchange no "
                "counts: give tokens_per_sample as a number, or choose another strategy"
            )
        progress = self._session.progress
        before, self._counted = self._counted, (progress.steps, progress.weighed_samples)
        if before is not None and progress.steps > before[0] and progress.weighed_samples == before[1]:
            raise RuntimeError(NOT_COUNTED)
        if progress.tokens_per_sample not in (0.0, tokens.per_sample):  # 0 while no step has had a token
            self._tokens, self._limits = tokens.limits(self._limits, progress.tokens_per_sample, self.dataset_size)
            self._lead()
            self._setting = None
            self._reading = self._reading and (self._reading[0], (-1, -1, -1, -1))  # divide it again from here

    @property
    def _leads(self) -> bool:
        """True if this loader reports for the job and adopts the batch size that the job chooses."""
        return self._session.registry.loaders.leads(self)

    def join(self, session: Session) -> None:
        """Attach this loader to the run of ``session``, in a process that runs several sessions in turn."""
        if session is not self._session:
            self._session, self._setting, self._passes = session, None, 0
            self._announce()

    @property
    def shape(self) -> BatchChoice:
        """Division of a full step: samples per worker and micro-step, and how many micro-steps only accumulate."""
        session, limits = self._session, self._limits
        if self._given.whole_batches:
            return BatchChoice(atomic_bsz=limits.init_batch_size)
        shape = session.states.shape if self._leads else None
        shape = shape or cut_within(limits, limits.init_batch_size, session.group.world_size)
        return bounded(limits, shape, session.states.progress.memory_bound)

    @property
    def current_local_bsz(self) -> int:
        """Largest number of samples that a worker currently processes in one micro-step."""
        return self.shape.atomic_bsz

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-steps per step that only accumulate gradients, before the last one synchronises them."""
        return self.shape.accum_steps

    @property
    def current_batch_size(self) -> int:
        """Current global batch size [samples]."""
        limits, unit = self._limits, self._session.run.unit
        size = limits.init_batch_size if limits.fixed else limits.size_of(self.shape, self._session.group.world_size)
        return size if unit is None or limits.fixed else unit.place.fitting(size)

    @property
    def total_batch_size(self) -> int:
        """Current global batch size [samples]; this is accelerate's name for :attr:`current_batch_size`."""
        return self.current_batch_size

    def __len__(self) -> int:
        """Return the number of steps in a pass at the current batch size.

        With ``whole_batches``, return the number of batches that this rank gets.

        Raises:
            TypeError: the dataset is iterable, or the batch sampler has no length.
        """
        batch_sampler = self._given.batch_sampler
        if batch_sampler is not None:
            return self._own_batches(len(batch_sampler))  # type: ignore[arg-type]
        samples = self.dataset_size
        if samples is None:
            raise TypeError("an AdaptiveDataLoader over an iterable dataset has no length")
        steps, rest = divmod(samples, self.current_batch_size)
        steps += rest > 0 and not self._drop_last
        return self._own_batches(steps) if self._given.whole_batches else steps

    def _own_batches(self, count: int) -> int:
        return batches_of(count, rank=self._session.group.rank, world_size=self._session.group.world_size)

    @property
    def dataset(self) -> Any:
        """Dataset that provides the samples."""
        return self._given.dataset

    @property
    def batch_size(self) -> int | None:
        """Global batch size given at construction [samples]; None if a batch sampler forms the batches."""
        return self._given.batch_size if self._given.batch_sampler is None else None

    @property
    def drop_last(self) -> bool:
        """True if a pass's last samples are dropped when they are fewer than a batch."""
        return self._drop_last

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def batches(self, *, joined_later: bool = False) -> Iterator[Any]:
        """Iterate over this rank's batches of one pass, like ``iter(loader)``.

        Args:
            joined_later: True to postpone joins, so that no rank joins between the last step and the epoch's end.
        """
        self._join_present_run()
        self._joined_later = joined_later
        loader_pass = self._session.enter_loop()
        if loader_pass.done:
            return
        self._reading = None
        self._counted = None  # steps since this loader's last pass are those of other loaders
        epoch = self._epoch()
        try:
            while True:
                session, batches = self._session, self._next_step(epoch, loader_pass)
                if batches is None:
                    if session.passes.end_round():
                        break
                    continue
                yield from self._micro_batches(batches)
                if session.replaced:
                    raise replaced_error()
                if session.passes.edge(loader_pass, ends_pass=joined_later and self.on_last_batch):
                    self._source.commit()
                    if session.passes.ended_early is loader_pass:
                        break
            total = loader_pass.position if self.dataset_size is None else self.dataset_size
        except GeneratorExit:
            # By break or by an exception: only after break does the program go on, and the step is committed then.
            self._session.ledger.abandon(loader_pass)
            raise
        finally:
            self._end_reading(loader_pass)
        self._session.passes.end_pass(
            loader_pass, total, put_off=joined_later, rest=functools.partial(self._hash_of_rest, epoch, loader_pass)
        )

    def _hash_of_rest(self, epoch: int, loader_pass: PassProgress) -> int | None:
        """Return the hash of the samples that an aborted pass leaves out; None if a sample may be drawn twice."""
        if not self._draws_from_all or not isinstance(self._source, MapBatches):
            return None
        return self._source.hash_of_rest(epoch, loader_pass.position)

    def _end_reading(self, loader_pass: PassProgress) -> None:
        """End the source's pass, unless a newer pass is already reading from it."""
        if self._reading is None or self._reading[0] is loader_pass:
            self._source.end()

    def _join_present_run(self) -> None:
        """Attach this loader to the current run; raises RuntimeError if it cannot set that run's batch."""
        self.join(session_of_thread() or self._session)
        if not self._limits.fixed and not self._leads:
            raise RuntimeError("autoscale_batch_size must be called before the first epoch")
        if self._counts_tokens and not self._leads:
            raise RuntimeError(
                f"only one AdaptiveDataLoader of a train loop may have tokens_per_sample={WEIGH!r}, made before the "
                "first epoch and beside none that adapts its batch: give another one a number"
            )

    def _micro_batches(self, batches: Sequence[Callable[[], Any]]) -> Iterator[Any]:
        """Yield this rank's micro-batches of the step that has started."""
        step: Any = self._session.ledger.step  # begun when its batches were cut
        for micro, fetch in enumerate(batches):
            step.start_micro(micro)
            batch = self._session.passes.fetched(fetch) if self._session.run.meter.on else fetch()
            ledger = self._session.ledger
            if ledger.drawn.looks and ledger.depth == 1:
                ledger.drawn.draw(batch)
            yield batch
            del batch  # the loop alone decides how long it lives
            if micro < len(batches) - 1 and not step.halved:
                self._session.run.clock.micro()

    def _epoch(self) -> int:
        """Return the epoch that determines the order; without ``remaining_epochs_until``, each pass is an epoch."""
        if self._session.in_epochs:
            return self._session.progress.epoch
        self._passes += 1
        return self._passes - 1

    def _next_step(self, epoch: int, loader_pass: PassProgress) -> Sequence[Callable[[], Any]] | None:
        """Divide the step at the pass's position and start it; return None if the pass has ended."""
        session = self._session
        run, adaptation = session.run, session.adaptation
        while True:
            if self._tokens is not None and self._tokens.counted and self._leads:
                self._recount(self._tokens)
            session.passes.check_group(loader_pass)
            present = run.shape_changes, run.registry.halving_changes, run.stragglers.changes, run.gpu_types.changes
            _, cut, _ = setting = self._present_cut(present)
            read, changes = self._reading or (None, None)
            # Also after a pass over this very loader that was nested in the last step.
            if read is not loader_pass or changes != present:
                cut.start(loader_pass.position, run.states.progress.steps)
                self._source.start(epoch, loader_pass.position, cut, new_pass=read is not loader_pass)
                self._reading = loader_pass, present
            within, other = run.ledger.round, None
            if within is not None and not within.left:  # this rank has made its own steps
                other = session.passes.step_of_another()
                if other is None:
                    session.passes.end_round(ends_pass=False)
                    continue
                assert isinstance(self._source, MapBatches), "else the steps to come are not known"
                step = self._source.step_of(*other, epoch, within.position, cut)
            else:
                step = self._source.step(epoch, loader_pass.position, cut)
                over = not step.sizes or loader_pass.done or (adaptation.active and adaptation.ends(loader_pass))
                if over and not run.ledger.depth:  # the end of a pass within a step compares what was described
                    return None
                facts = functools.partial(self._plan.of, epoch, self._limits)
                if not session.passes.compare_plan(loader_pass, facts, leads=setting[2]):
                    continue
                if over:
                    return None
            begun = self._begun(step, loader_pass, setting, taken=other is not None)
            session.passes.start_step(begun)
            if session.passes.makes_step(begun):
                return step.fetches
            if begun.given and isinstance(self._source, MapBatches):
                self._source.pass_over(epoch, loader_pass.position, cut)
            session.passes.edge(loader_pass)

    def _begun(self, step: StepBatches, loader_pass: PassProgress, setting: _Setting, *, taken: bool) -> LoaderStep:
        """Return the ledger's record for a step that is starting; with ``taken``, the step belongs to another rank."""
        shape, cut, leads = setting
        return LoaderStep(
            loader_pass=loader_pass,
            total=step.total,
            sizes=step.sizes,
            scale=cut.batch_size / self._limits.init_batch_size,
            init_batch_size=self._limits.init_batch_size,
            shape=shape,
            ordinal=self._session.ledger.next_ordinal,
            can_switch=lambda world_size: self._source.can_switch(
                loader_pass.position // cut.shards, step.total // cut.shards, world_size
            ),
            leads=leads,
            whole=self._given.whole_batches,
            sample_tag=step.sample_tag,
            hashed=step.hashed if leads else None,
            population=step.total if self._draws_from_all else None,
            to_come=None if self._joined_later else step.to_come,
            taken=taken,
        )

    def _present_cut(self, changes: _Changes) -> _Setting:
        """Return the setting for the next step, and whether this loader leads; cached until ``changes`` differs.

        Args:
            changes: counters of changes to the group, the halved steps, and the ranks' shares.
        """
        if self._setting is None or self._setting[0] != changes:
            session, shape = self._session, self.shape
            cut = StepSplit(
                batch_size=self.current_batch_size,
                micro_steps=shape.accum_steps + 1,
                world_size=session.group.world_size,
                rank=session.group.rank,
                drop_last=self._drop_last,
                shares=self._shares,
                halving=self._halving(shape),
                least=self._session.registry.least_share if self._leads and not self._given.whole_batches else 1,
                owed=self._owed(),
                most=session.states.progress.memory_bound,
                shard=self._shard_of_unit[0],
                shards=self._shard_of_unit[1],
            )
            self._setting = changes, shape, cut, self._leads
        return self._setting[1:]

    def _owed(self) -> int:
        """Return the size of a step that must be drawn again, although its update is in the model; 0 if none."""
        run = self._session.run
        return run.progress.stepped_samples if run.progress.optimizers_stepped and not run.ledger.depth else 0

    @property
    def _shard_of_unit(self) -> tuple[int, int]:
        """Index of the part that this worker reads of its unit's samples, and the number of parts."""
        unit = self._session.run.unit
        if unit is None or unit.place.shards == 1:
            return 0, 1
        total = None if self._given.whole_batches else self.dataset_size
        return unit.place.share(self.current_batch_size, total, drop_last=self._drop_last)

    def _halving(self, shape: BatchChoice) -> Halving | None:
        """Return the rule for steps halved to measure noise; None if ranks or micro-batches show the noise already."""
        session = self._session
        if not self._leads or session.group.world_size > 1 or shape.accum_steps or self._given.whole_batches:
            return None
        return session.registry.halving(session.states.progress.steps)

    def _halved_ahead(self, position: int, steps: int) -> int:
        cut = self._setting[2] if self._setting is not None else None
        if cut is None or cut.halving is None or steps <= 0:
            return 0
        first = cut.step_at(position) + 1
        return cut.halving.count(first, first + steps, cut.batch_size)

    @property
    def _shares(self) -> Shares | None:
        """Shares of a step for ranks with unequal speeds; None divides equally."""
        run = self._session.run
        weights = run.gpu_types.weights(run.stragglers.weights)
        if weights is None:
            return None
        least = self._limits.least
        bounds = [each for each in (self._limits.upper, run.states.progress.memory_bound) if each is not None]
        most, parts = min(bounds, default=None), self._shard_of_unit[1]  # shares count a sample of each shard as one
        least = -(-least // parts)
        return Shares(weights=weights, least=least, most=None if most is None else max(least, most // parts))


def _source_of(given: LoaderArguments, *, seed: int, drop_last: bool) -> BatchSource:
    """Return the source of one rank's batches that suits the dataset and arguments of a loader.

    Raises ValueError: dropping the last batch would leave no batch in an epoch.
    """
    if isinstance(given.dataset, BringsBatches):
        return given.dataset.batch_source(given.options.get("collate_fn"))
    if isinstance(given.dataset, IterableDataset):
        return StreamBatches(given.dataset, seed=seed, collate=given.options.get("collate_fn"))
    make_order = functools.partial(_order_of, given)
    make_order()  # here, for its errors
    if given.batch_sampler is None and drop_last and given.batch_size > len(given.dataset):
        raise ValueError(
            f"with drop_last=True batch_size must be at most the {len(given.dataset)} samples of an epoch, else "
            f"nothing is left, but got {given.batch_size}"
        )
    if not given.whole_batches:
        return MapBatches(given, make_order, seed=seed)
    return WholeBatches(given, make_order, seed=seed, drop_last=drop_last)


def _order_of(given: LoaderArguments) -> EpochOrder:
    """Return the order of samples that the loader's arguments imply, for the dataset's current length."""
    if given.batch_sampler is not None:
        return BatchSamplerOrder(given.batch_sampler, samples=len(given.dataset))
    return order_for(given.dataset, shuffle=given.shuffles, sampler=given.sampler)
