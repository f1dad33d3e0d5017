"""Lightning's training loops, changed so that all workers agree on epochs, steps and when to stop."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from lightning.pytorch import callbacks
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.integrations.batch_options import LoggedValues
from elastic_ray.integrations.late_wrapping import share_buffers
from elastic_ray.integrations.lightning.fetcher import ElasticFetcher, UnreadStream
from elastic_ray.integrations.lightning.shared import accumulating, set_rank
from elastic_ray.integrations.lightning.state import StepState, TrainerState
from elastic_ray.integrations.overridden import check_overridden
from elastic_ray.loop.api import current_session
from elastic_ray.loop.epochs import Epochs
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.run.current import WorkerDismissed
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.tree import DictState

_AVERAGING: Any = getattr(callbacks, "WeightAveraging", ())  # from Lightning 2.6 on

check_overridden(
    "lightning",
    "lightning",
    {
        _FitLoop: [
            *("setup_data", "run", "done", "on_advance_start", "on_advance_end", "restarting"),
            *("on_save_checkpoint", "on_load_checkpoint"),
        ],
        _TrainingEpochLoop: [
            *("reset", "advance", "on_advance_end", "update_lr_schedulers", "_should_accumulate", "_get_monitor_value"),
            *("_should_check_val_fx", "_num_ready_batches_reached", "on_run_start"),
        ],
        _Loop: ["restarting", "on_iteration_done"],
    },
)


logger = logging.getLogger(__name__)

_NOT_SENT = (
    "what the module's on_save_checkpoint() saves does not reach workers that join: keep it in buffers, return it from "
    "get_extra_state(), or register it: elastic_ray.register_state(name, object)"
)
_PLACE = "elastic_ray_place"  # in a checkpoint: Lightning's loaders, which have no state, refuse one under their name


class _BatchLostError(Exception):
    """Error raised if a worker was lost during the step; the step is drawn again."""


class ElasticFitLoop(_FitLoop):
    """Fit loop that runs the job's epochs; :func:`become_elastic` converts a trainer's loop in place."""

    _epochs: Epochs | None = None
    _came_later = False  # within an epoch, whose end it takes part in though training may be done then
    _place: dict[str, Any] | None = None  # in the data, of the checkpoint that was read
    _data_fetcher: Any

    @functools.cached_property
    def logged(self) -> LoggedValues:
        """Reporter that sends the values logged with ``self.log`` to the job's metrics."""
        return LoggedValues()

    def setup_data(self) -> None:
        """Set up data as Lightning does, then fetch batches from the ``AdaptiveDataLoader`` only."""
        if self._combined_loader is not None:
            return
        super().setup_data()
        made: Any = self._combined_loader
        if made is None:
            return
        trainer: Any = self.trainer
        loaders = made.flattened
        kept = isinstance(made.iterables, (dict, list, tuple))
        if len(loaders) != 1 or kept or isinstance(self._data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError(
                "under elastic-ray a LightningModule trains on one train_dataloader, whose batch training_step takes, "
                f"but there are {len(loaders)} loaders, or one within a {type(made.iterables).__name__}, or it takes a "
                "dataloader_iter. Where batches of several datasets belong together, use one loader over a dataset "
                "that gives an item of each"
            )
        most = trainer.limit_train_batches
        limited = isinstance(most, int) or most != 1.0 or trainer.overfit_batches > 0
        limit = made.limits[0] if limited else None
        self._data_fetcher = ElasticFetcher(
            loaders[0].loader if isinstance(loaders[0], UnreadStream) else loaders[0],
            None if limit is None or limit == math.inf else int(limit),
            on_batch=lambda fetcher: self.epoch_loop.update_length(fetcher),
        )

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return Lightning's state with the data position under a separate key, so that any trainer can load it."""
        state: dict[str, Any] = super().on_save_checkpoint()
        if "combined_loader" in state:
            passes = current_session().progress.passes
            used = passes[0].position if passes else 0  # of an epoch that max_steps have cut short, which is over here
            cut_short = 0 <= self.max_steps <= self.epoch_loop.global_step
            state[_PLACE] = {**state.pop("combined_loader")[0], "used": used, "cut_short": cut_short}
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Load Lightning's state, and the data position if the checkpoint contains one."""
        theirs = {name: value for name, value in state_dict.items() if name != "combined_loader"}
        super().on_load_checkpoint(theirs)  # the places of their loaders are not ours
        self._place = state_dict.get(_PLACE)

    def run(self) -> None:
        """Join the job, then run Lightning's fit loop over the job's remaining epochs."""
        self.setup_data()
        if self._combined_loader is None:  # limit_train_batches=0, or nothing to train
            return super().run()
        session = current_session()
        epochs = Epochs(self._count_epochs())
        session.states.register("lightning", DictState(TrainerState(self.trainer)))
        averages = (each for each in self.trainer.callbacks if isinstance(each, _AVERAGING))
        for number, callback in enumerate(averages):  # whose own state_dict() is without the average
            er.register_state(f"lightning average {number}", callback._average_model)
        step = StepState(self.trainer)
        session.states.register_rollback(step.remember, step.roll_back)
        self._start_where_restored()
        try:
            epochs.join()
            self._count_epochs_done(session.progress.epoch)
            if session.elastic and is_overridden("on_save_checkpoint", self.trainer.lightning_module):
                session.run.notify("warning", _NOT_SENT)
            self._epochs = epochs
            self._came_later = bool(session.progress.passes)
            set_rank()
            _start_anew(self)
            super().run()
            too_few = epochs.done and self.max_epochs in (None, -1) and self.epoch_loop.global_step < self.max_steps
            if too_few and not self.trainer.should_stop and not session.adaptation.stopped:
                logger.warning(
                    "the training ended after %d of max_steps=%d: on_train_batch_start() has ended epochs before their "
                    "last batch, so that they were too few; give max_epochs as well",
                    *(self.epoch_loop.global_step, self.max_steps),
                )
        except BaseException as error:
            strategy: Any = self.trainer.strategy
            strategy.leave(goes_on=isinstance(error, (WorkerDismissed, LostGroupError, CommunicationFailedError)))
            raise

    def _start_where_restored(self) -> None:
        """Start at the position of the checkpoint that Lightning loaded (``fit(ckpt_path=)``), if any."""
        if not self._loaded_from_state_dict:
            if self.epoch_loop.global_step:  # trained before, by this trainer
                self._start_at_own_place()
            return
        theirs: Any = self.epoch_loop
        progress: Any = theirs.batch_progress
        place, self._place = self._place, None
        within = self.epoch_progress.current.ready > self.epoch_progress.current.processed
        if within:  # Lightning counts a batch after what saves
            theirs._batches_that_stepped += 1
        for theirs in (progress.total, progress.current):
            theirs.ready = theirs.started = theirs.completed = theirs.processed
        theirs, batches = self.epoch_progress.current, progress.current.processed
        if within and progress.is_last_batch:  # nothing of its epoch is left but hooks
            theirs.processed += 1
            batches = 0
            if place is not None:
                place = {**place, "epoch": theirs.processed, "passes": [], "samples_left": 0}
        elif (
            not within
            and batches
            and not progress.is_last_batch
            # max_steps, rather than a callback, has ended the epoch for good; another strategy does not say so
            and (self.max_steps >= 0 if place is None else place["cut_short"])
        ):
            theirs.processed -= 1
            within = True
            if place is not None:
                place = {**place, "epoch": theirs.processed, "passes": [[place["used"], False]]}
        self.epoch_loop.moved_epochs = theirs.processed
        if place is not None:
            self._data_fetcher.loader.load_state_dict(place)
        self._start_at_own_place(batches if within else 0)

    def _start_at_own_place(self, batches: int = 0) -> None:
        """Start at the trainer's own counters, unless the job already has a position."""
        states = current_session().states
        if states.progress.epoch or states.progress.passes or states.progress.steps:
            return
        begun = RunProgress(epoch=self.epoch_progress.current.processed, steps=self.epoch_loop.global_step)
        loader = self._data_fetcher.loader
        position, samples = batches * loader.batch_size, loader.dataset_size
        if samples is not None and position >= samples:  # the batch was smaller where they were counted
            begun.epoch += 1
        elif position:
            begun.start_pass(0)
            begun.passes[0].advance(position)
        states.start_from(begun)

    def _count_epochs(self) -> int:
        """Return the number of epochs to train; the job's progress is based on it."""
        known = self.max_epochs if self.max_epochs is not None and self.max_epochs >= 0 else None
        if self.max_steps < 0:
            if known is None:
                raise ValueError("max_epochs=-1 without max_steps has no end, so that a job's progress is not known")
            return known
        steps = self.max_batches if self.max_batches != math.inf else None
        if steps is None or _adapts():
            if known is None:
                raise ValueError(
                    "max_steps without max_epochs gives no number of epochs if the batch adapts or an iterable "
                    "dataset has no length: set max_epochs too"
                )
            return known
        if known is not None and is_overridden("on_train_batch_start", self.trainer.lightning_module):
            return known  # the hook may end an epoch before its last batch
        by_steps = math.ceil(self.max_steps / max(steps, 1))
        return by_steps if known is None else min(known, by_steps)

    @property
    def done(self) -> bool:
        """True if Lightning's limits have been reached, all epochs are done, or a policy has ended the training."""
        return not self._came_later and (super().done or (self._epochs is not None and self._epochs.done))

    def on_advance_start(self) -> None:
        """Start the job's current epoch."""
        assert self._epochs is not None
        epoch = self._epochs.start_epoch()
        self._came_later = False
        self._count_epochs_done(epoch)
        super().on_advance_start()

    def _count_epochs_done(self, epoch: int) -> None:
        progress: Any = self.epoch_progress
        for theirs in (progress.total, progress.current):
            theirs.ready = theirs.started = theirs.processed = theirs.completed = epoch

    def on_advance_end(self) -> None:
        """End the epoch at the same time as all other workers."""
        super().on_advance_end()
        self.logged.report(self.trainer.callback_metrics)
        assert self._epochs is not None
        self._epochs.end_epoch()


class ElasticEpochLoop(_TrainingEpochLoop):
    """Epoch loop that starts at the job's position in the epoch; all workers end each step at the same time."""

    _came_later = False  # within the epoch, so that its counts are others'
    moved_epochs = 0  # at whose ends schedulers that count epochs have moved

    @property
    def done(self) -> bool:
        """True if the epoch ends now; a worker that joined mid-epoch first checks for more batches."""
        return not self._came_later and super().done

    def reset(self) -> None:
        """Reset the epoch's counters, or keep them if the job is already within the epoch."""
        session = current_session()
        ordinal, passes = session.ledger.next_ordinal, session.progress.passes
        if ordinal >= len(passes) or not (passes[ordinal].position or passes[ordinal].done):
            super().reset()
            return
        self._came_later = True

    def on_run_start(self, data_fetcher: Any) -> None:
        """Make the fetcher count batches from the number already used in this epoch."""
        super().on_run_start(data_fetcher)
        theirs = data_fetcher
        theirs.fetched = self.batch_progress.current.ready

    def advance(self, data_fetcher: Any) -> None:
        """Train one micro-batch; a step's last micro-batch is trained again if a failure voided the step."""
        set_rank()
        self._came_later = False
        if data_fetcher.exhausted:  # this worker has come after the last batch, or its end was not known before
            theirs = self.batch_progress
            theirs.is_last_batch = True
            if not data_fetcher.left_early:
                self._end_of_data()
            return
        self._train_batch(data_fetcher)
        while data_fetcher.done and not data_fetcher.at_limit:
            if data_fetcher.exhausted:
                self._end_of_data()
                return
            self._train_batch(data_fetcher)
        trainer = self.trainer
        while (
            data_fetcher.at_limit
            or self._is_training_done
            or (trainer.should_stop and trainer.fit_loop._can_stop_early)  # min_steps and min_epochs are reached
        ):
            if data_fetcher.leave():
                if data_fetcher.at_limit:
                    self._end_of_data()
                return
            self._train_batch(data_fetcher)

    def _train_batch(self, data_fetcher: Any) -> None:
        """Run Lightning's ``advance`` until a micro-batch counts; end-of-batch hooks are skipped for a lost one."""
        while True:
            try:
                return super().advance(data_fetcher)
            except _BatchLostError:
                if data_fetcher.exhausted:  # others had finished its step, which was the last
                    data_fetcher.finish()
                    return None
            except StopIteration:
                if data_fetcher.leave():
                    self._end_of_data()
                    raise

    def _end_of_data(self) -> None:
        """Step the schedulers that count epochs, unless this epoch's last step has already done so."""
        session, epoch = current_session(), self.trainer.current_epoch
        if self.moved_epochs > epoch or session.ledger.accumulating:
            return
        self.moved_epochs = epoch + 1
        with session.ledger.counting_one():
            super().update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Update schedulers as Lightning does; schedulers that count epochs step once per epoch."""
        if interval == "step" and not update_plateau_schedulers and current_session().ledger.failed:
            raise _BatchLostError
        if interval == "step" or update_plateau_schedulers:
            super().update_lr_schedulers(interval, update_plateau_schedulers)
        else:
            self._end_of_data()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate if due, with rank 0's buffers on all ranks, and report logged values to the job."""
        session = current_session()
        if session.ledger.failed:
            return
        if session.ledger.step is not None and self._should_check_val_fx(data_fetcher):
            share_buffers(self.trainer.lightning_module)
        super().on_advance_end(data_fetcher)
        theirs = self.trainer
        if not session.ledger.accumulating and self.global_step % max(1, theirs.log_every_n_steps) == 0:
            theirs.fit_loop.logged.report(theirs.callback_metrics)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """Decide as Lightning does; if ``val_check_interval`` is a time, use rank 0's clock."""
        checks = super()._should_check_val_fx(data_fetcher)
        by_time = getattr(self.trainer, "_val_check_time_interval", None)  # from Lightning 2.6 on
        return checks if by_time is None else bool(er.broadcast(checks))

    def _should_accumulate(self) -> bool:
        """True if this micro-batch is not the last of the job's step."""
        return accumulating()

    def _get_monitor_value(self, key: str) -> Any:
        """Return rank 0's monitored value, so that plateau schedulers set the same learning rate on all ranks."""
        return er.broadcast(super()._get_monitor_value(key))

    def update_length(self, fetcher: ElasticFetcher) -> None:
        """Set the epoch's number of batches and validation interval to match the current batch and group size."""
        batches = fetcher.batches_of_epoch(self.batch_progress.current.ready + 1)
        theirs: Any = self.trainer.fit_loop
        theirs.max_batches = batches
        theirs = self.trainer
        fraction = getattr(theirs, "val_check_interval", None)  # not there where the interval is a time
        if isinstance(fraction, float) and theirs.val_check_batch not in (None, math.inf):
            theirs.val_check_batch = max(1, int(batches * fraction))


def become_elastic(trainer: Any) -> None:
    """Convert a trainer's loops to elastic ones in place; raise TypeError if they are not Lightning's own."""
    for theirs, ours in ((trainer.fit_loop, ElasticFitLoop), (trainer.fit_loop.epoch_loop, ElasticEpochLoop)):
        if type(theirs) is not ours:
            if type(theirs) is not ours.__base__:
                raise TypeError(
                    f"ElasticRayStrategy drives Lightning's own loops, but this is a {type(theirs).__name__}"
                )
            theirs.__class__ = ours


def trains(trainer: Any) -> bool:
    """True if a trainer is in its training stage, not in an evaluation."""
    return trainer is not None and trainer.state.stage == RunningStage.TRAINING


def _adapts() -> bool:
    """True if the number of steps per epoch may change."""
    info = current_session().registry.loaders.info
    return info is not None and not info.limits.one_size


def _start_anew(loop: Any) -> None:
    """Clear Lightning's restart flags, so that the loops start at the job's position even after a checkpoint load."""
    for theirs in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        theirs._restarting = theirs._loaded_from_state_dict = theirs._resuming_from_checkpoint = False
