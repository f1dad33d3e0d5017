"""``transformers.Trainer`` in an elastic job."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer import logger as _logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

import elastic_ray as er
from elastic_ray.integrations.batch_options import BatchOptions, LoggedValues
from elastic_ray.integrations.huggingface.arguments import accumulated, check_arguments, elastic
from elastic_ray.integrations.huggingface.collectives import Collectives, SavesAlone, read_position, write_position
from elastic_ray.integrations.huggingface.data import counts_items, shared_loader, train_loader
from elastic_ray.integrations.huggingface.prepared import step_through_ours
from elastic_ray.integrations.huggingface.state import StepProgress, TrainerProgress
from elastic_ray.integrations.late_wrapping import plain_model, share_buffers
from elastic_ray.integrations.overridden import check_overridden
from elastic_ray.loop.api import current_session, get_context, session_of_new_model
from elastic_ray.loop.epochs import Epochs
from elastic_ray.parallel.refusals import refuse_wrapped
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.tree import DictState
from elastic_ray.steps.step import LoaderStep

check_overridden(
    "transformers",
    "huggingface",
    {
        transformers.Trainer: [
            *("_inner_training_loop", "_prepare_for_training", "_init_training_state", "set_initial_training_values"),
            *("_finalize_training", "_maybe_log_save_evaluate", "_save_checkpoint", "_get_num_items_in_batch"),
            *("get_train_dataloader", "_get_train_sampler", "_get_collator_with_removed_columns", "training_step"),
            *("_remove_unused_columns", "_clip_grad_norm", "_get_grad_norm", "_get_learning_rate", "store_flos"),
            *("_track_num_input_tokens", "_get_output_dir", "_evaluate", "evaluate", "is_world_process_zero"),
            "_load_rng_state",
        ]
    },
)

_Theirs: Any = transformers.Trainer if TYPE_CHECKING else object

_END = object()
_PLATEAU = (torch.optim.lr_scheduler.ReduceLROnPlateau,)


class ElasticTrainerMixin(SavesAlone, _Theirs):
    """Mixin that runs ``transformers.Trainer``, or a subclass, as an elastic job; list it first in the bases.

    ``per_device_train_batch_size`` becomes the global batch, which is divided between all workers. Every worker
    evaluates all the data; rank 0 saves and logs. A causal-LM loss is weighted exactly by tokens, over ranks and
    micro-batches. ``max_steps`` and schedulers count steps of the initial batch, so that training ends after the
    intended number of samples even if the batch grows.

    Args:
        max_batch_size: Largest global batch [samples], as in ``AdaptiveDataLoader.autoscale_batch_size``. None keeps
            the batch fixed.
        local_bsz_bounds: Fewest and most samples that one worker processes at once; None if unbounded.
        gradient_accumulation: True if a step may have several micro-batches.
        elastic_options: Arguments of ``AdaptiveDataParallel`` (``strategy``, ``policy``, ``scaling_rule``, ...).
        args: Positional arguments of the extended class.
        kwargs: Keyword arguments of the extended class.

    Raises:
        ValueError: An argument is not supported while workers join and leave; the message names an alternative.
    """

    control: Any
    current_flos: Any
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
        elastic_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._batch_options = BatchOptions(
            max_batch_size=max_batch_size,
            local_bsz_bounds=local_bsz_bounds,
            gradient_accumulation=gradient_accumulation,
        )
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if isinstance(given, transformers.TrainingArguments):
            check_arguments(given)  # before theirs does, which knows of no way out
            elastic(given)
        super().__init__(*args, **kwargs)
        check_arguments(self.args)
        refuse_wrapped(self.model, er.AdaptiveDataParallel)
        elastic(self.args)
        self._batch_options = dataclasses.replace(self._batch_options, accumulated=accumulated(self.args))
        self._logged = LoggedValues()
        self._set_log_level()
        self._elastic_options = elastic_options or {}
        self.tr_weight = 0.0
        self.initial_steps = 0
        self._random_numbers_of: str | None = None
        self._within_epoch = False  # where the checkpoint stands that they are of
        self._losses: list[torch.Tensor] = []
        self._in_step = False
        self._unwrap_ours()
        self._gather_in_steps()

    def _unwrap_ours(self) -> None:
        """Make ``accelerator.unwrap_model`` unwrap our models too: label smoothing uses it to get the model's name."""
        theirs: Any = self.accelerator
        original = theirs.unwrap_model

        def unwrap_model(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
            result: torch.nn.Module = original(plain_model(model), *args, **kwargs)
            return result

        theirs.unwrap_model = unwrap_model

    def _gather_in_steps(self) -> None:
        """Let accelerate's collectives span all workers in a training step (as TRL's do), and this worker elsewhere."""
        theirs: Any = self.accelerator

        def routed(alone: Callable[..., Any], together: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: (together if self._in_step else alone)(*args, **kwargs)

        for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
            together = types.MethodType(getattr(Collectives, name), theirs)
            setattr(theirs, name, routed(getattr(theirs, name), together))

    # --- data

    def get_train_dataloader(self) -> er.AdaptiveDataLoader:
        """Return a training loader that divides its global batches between all workers."""
        return train_loader(self)

    # --- the loop

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Prepare as Trainer does, then wrap the model, which may be compiled, and its optimizer for the job."""
        prepared, _ = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        model = er.AdaptiveDataParallel(
            plain_model(prepared),  # a second train() is given the first one's wrapper
            optimizer,
            lr_scheduler=self.lr_scheduler,
            grad_scaler=self.accelerator.scaler,
            **self._elastic_options,
        )
        step_through_ours(self.optimizer)
        self.model_wrapped = model
        return model, train_dataloader

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Run Trainer's training loop with the job's epochs and steps."""
        self.accelerator.free_memory()
        session_of_new_model()  # alone, a second training is a run of its own, whose loader begins anew
        loader = shared_loader(self.get_train_dataloader(), self._batch_options)
        epochs, per_epoch, examples, samples, _, _, max_steps = self.set_initial_training_values(args, loader)
        done, within = self._init_training_state(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        model, loader = self._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        begin_s = time.time()
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss, self._total_loss_scalar, self.tr_weight = torch.tensor(0.0, device=args.device), 0.0, 0.0
        self.initial_steps = self.state.global_step
        job = Epochs(int(epochs) if has_length(loader) else max_steps)
        session = current_session()
        session.states.register("transformers", DictState(TrainerProgress(self)))
        step = StepProgress(self)
        session.states.register_rollback(step.remember, step.roll_back)
        goes_on = resume_from_checkpoint is not None and self._resume(
            Path(resume_from_checkpoint), loader, done, within
        )
        job.join()
        self._set_rank()
        planned = {"Num examples": examples, "Num Epochs": epochs, "Num update steps per epoch": per_epoch}
        self._report_start(loader, {**planned, "Total optimization steps": max_steps})
        alone = get_context().get_world_size() == 1  # several would draw the same numbers
        self._random_numbers_of = resume_from_checkpoint if goes_on and alone else None
        model.zero_grad()
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        self._within_epoch = bool(within)
        while not (job.done or self.control.should_training_stop):
            epoch = job.start_epoch()
            self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self._train_epoch(model, loader, epoch, trial, ignore_keys_for_eval, begin_s)
            job.end_epoch()
        self._average_loss()
        return self._finalize_training(trial, samples, begin_s)

    def _report_start(self, loader: er.AdaptiveDataLoader, planned: dict[str, int]) -> None:
        """Log Trainer's usual training summary, which people and tools expect, with the job's current batch."""
        trainable = sum(each.numel() for each in self.model.parameters() if each.requires_grad)
        said = {
            **planned,
            "Instantaneous batch size per device": loader.current_local_bsz,
            "Total train batch size (w. parallel, distributed & accumulation)": loader.current_batch_size,
            "Gradient Accumulation steps": loader.accumulation_steps + 1,
            "Number of trainable parameters": trainable,
        }
        _logger.info("***** Running training *****")
        for what, count in said.items():
            _logger.info("  %s = %s", what, f"{count:,}")

    def _resume(self, folder: Path, loader: er.AdaptiveDataLoader, epochs: int, batches: int) -> bool:
        """Resume from a Trainer checkpoint unless the job has its own progress; return True if it has none."""
        states = current_session().states
        own = bool(states.progress.steps or states.progress.epoch or states.progress.passes)
        position = read_position(folder)
        if position is not None:
            if self.args.ignore_data_skip:  # from the first sample of the epoch that it stands in
                position = {**position, "passes": [], "samples_left": 0}
            loader.load_state_dict(position)
        elif not own:
            begun = RunProgress(epoch=epochs, steps=self.state.global_step)
            if batches:
                begun.start_pass(0)
                begun.passes[0].advance(batches * self._train_batch_size)
            states.start_from(begun)
        return not own

    def _train_epoch(
        self, model: Any, loader: er.AdaptiveDataLoader, epoch: int, trial: Any, ignored: Any, begin_s: float
    ) -> None:
        """Train one epoch, starting at the job's current position in it."""
        if self._random_numbers_of is not None and not self._within_epoch:  # the epoch's loader draws from them, too
            self._load_rng_state(self._random_numbers_of)
        batches: Any = loader.batches(joined_later=True)
        last: dict[str, Any] = {"grad_norm": None, "learning_rate": None}
        while (inputs := next(batches, _END)) is not _END:
            self._set_rank()
            if self._random_numbers_of is not None and self._within_epoch:  # after the loader has drawn, as theirs does
                self._load_rng_state(self._random_numbers_of)
            self._random_numbers_of = None
            if self._micro_step(model, loader, inputs, last):
                self._after_step(loader, epoch)
                self._maybe_log_save_evaluate(
                    self._tr_loss,
                    last["grad_norm"],
                    model,
                    trial,
                    epoch,
                    ignored,
                    begin_s,
                    learning_rate=last["learning_rate"],
                )
            if self.control.should_epoch_stop or self.control.should_training_stop:
                current_session().passes.end_after_step()
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(
            self._tr_loss, last["grad_norm"], model, trial, epoch, ignored, begin_s, learning_rate=last["learning_rate"]
        )

    def _micro_step(self, model: Any, loader: er.AdaptiveDataLoader, inputs: Any, last: dict[str, Any]) -> bool:
        """Train one micro-batch; return True if it completes a step that counts."""
        ledger = current_session().ledger
        step = current_session().ledger.step
        assert step is not None, "a batch was drawn"
        ends = not ledger.accumulating
        self.accelerator.gradient_state._set_sync_gradients(ends)
        self.current_gradient_accumulation_steps = 1
        if step.micro == 0:
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        count = self._weigh(loader, inputs)
        if step.micro == 0:
            self._losses = []
        self._in_step = True
        try:
            self._losses.append(self.training_step(model, inputs, count))
        finally:
            self._in_step = False
        self.current_flos += float(self.floating_point_ops(inputs))
        self._track_num_input_tokens(inputs)
        if not ends:
            model.zero_grad()  # the step has them already
            self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
            return False
        last["grad_norm"] = self._get_grad_norm(
            model, grad_norm=self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        )
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        if ledger.failed:  # drawn again: nothing is reported
            model.zero_grad()
            return False
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        last["learning_rate"] = self._get_learning_rate()
        if not self.accelerator.optimizer_step_was_skipped and not isinstance(self.lr_scheduler, _plateaus()):
            self.lr_scheduler.step()
        model.zero_grad()
        return True

    def _weigh(self, loader: er.AdaptiveDataLoader, inputs: Any) -> Any:
        """Return ``num_items_in_batch`` or None, and weight the micro-batch by it if the loss divides by it."""
        count = self._get_num_items_in_batch([inputs], self.args.device)
        if count is not None and not counts_items(type(self).compute_loss):
            return count  # a loss of the user's own, which is a mean over samples
        if count is not None:
            loader.weigh(float(count))
        return count

    def _add_losses(self, step: LoaderStep) -> None:
        """Add the step's losses, weighted by this worker's share of the gradient; all workers' shares sum to 1."""
        work = step.work
        total = sum(map(sum, work))
        for loss, count in zip(self._losses, work[get_context().get_world_rank()], strict=True):
            if count and (not self.args.logging_nan_inf_filter or bool(torch.isfinite(loss))):
                self._tr_loss += loss.to(self._tr_loss.device) * (count / total)
                self.tr_weight += count / total

    def _after_step(self, loader: er.AdaptiveDataLoader, epoch: int) -> None:
        """Count an applied step, and stop training once the job's progress reaches ``max_steps``."""
        session = current_session()
        step = session.ledger.step
        assert step is not None, "its batch was drawn"
        self._add_losses(step)
        self.initial_steps += session.ledger.initial_steps
        theirs = self.state
        theirs.global_step += 1
        size, used = loader.current_batch_size, step.loader_pass.position + step.count
        if has_length(loader):
            batches = step.total // size if loader.drop_last else -(-step.total // size)
        else:
            batches = theirs.max_steps  # of a stream theirs knows nothing better
        theirs.epoch = epoch + -(-used // size) / max(batches, 1)  # theirs counts batches, the last as much as any
        if loader.on_last_batch and has_length(loader):
            theirs.epoch = float(epoch + 1)
        if self.initial_steps >= theirs.max_steps:
            theirs = self.control
            theirs.should_training_stop = True
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)

    def _set_rank(self) -> None:
        theirs = self.state
        before = theirs.is_local_process_zero, theirs.is_world_process_zero
        now = self.is_local_process_zero(), self.is_world_process_zero()
        theirs.is_local_process_zero, theirs.is_world_process_zero = now
        if now != before:
            self._set_log_level()

    def _set_log_level(self) -> None:
        """Set transformers' log level: ``log_level`` on ranks that log, ``log_level_replica`` on other ranks."""
        transformers.utils.logging.set_verbosity(self.args.get_process_log_level())

    def is_world_process_zero(self) -> bool:
        """True if this worker has rank 0, which saves and logs."""
        return get_context().get_world_rank() == 0

    def is_local_process_zero(self) -> bool:
        """True if this worker is the first on its node."""
        return get_context().get_local_rank() == 0

    # --- logs, evaluation, checkpoints

    def _average_loss(self) -> None:
        """Set ``_tr_loss`` to the mean loss over workers, times the number of steps that Trainer divides by."""
        total, weight = er.all_reduce(
            torch.tensor([float(self._tr_loss), self.tr_weight], dtype=torch.float64)
        ).tolist()
        steps = self.state.global_step - self._globalstep_last_logged
        self._tr_loss.fill_(total / weight * steps if weight else 0.0)
        self.tr_weight = 0.0

    def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate as Trainer does, with the loss over all workers and rank 0's buffers everywhere."""
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._average_loss()
        if current_session().ledger.failed:  # drawn again, and all that follows with it
            return
        if self.control.should_evaluate and current_session().ledger.step is not None:
            share_buffers(self.model)
        super()._maybe_log_save_evaluate(self._tr_loss, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return metrics over all evaluation data; every worker evaluates, and during training all return rank 0's."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return er.broadcast(metrics) if self.is_in_train else metrics

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, and add the values to the job's metrics."""
        super().log(logs, *args, **kwargs)
        self._logged.report(logs)

    def store_flos(self) -> None:
        """Store the number of floating-point operations, summed over all workers."""
        if not self._saves_alone:
            self.current_flos = er.all_reduce(float(self.current_flos))
        super().store_flos()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        theirs = self.state
        before = theirs.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        theirs.num_input_tokens_seen = before + er.all_reduce(theirs.num_input_tokens_seen - before)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint and data position as Trainer does, on rank 0 (or each node, ``save_on_each_node``)."""
        if trial is None:
            self.store_flos()
        if current_session().ledger.failed:  # the step is drawn again, and saved then
            return
        if self.args.should_save:
            with self._alone():
                super()._save_checkpoint(model, trial)
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            if folder.is_dir():
                write_position(folder)
        theirs = self.state
        theirs.best_model_checkpoint = er.broadcast(theirs.best_model_checkpoint)


class Trainer(ElasticTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` as an elastic job, within a train function; see :class:`ElasticTrainerMixin`."""


def _plateaus() -> tuple[type, ...]:
    """Return the scheduler classes that step on a metric."""
    greedy = getattr(transformers.optimization, "GreedyLR", None)
    return _PLATEAU if greedy is None else (*_PLATEAU, greedy)
