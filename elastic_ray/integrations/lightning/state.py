"""State of a Lightning run for joiners, checkpoints and repeated steps: loops, callbacks, logged values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.call import _call_callbacks_load_state_dict, _call_callbacks_state_dict
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

# What ModelCheckpoint decides by, and its own state does not contain.
_SAVING = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


class TrainerState:
    """Trainer state that is identical on all ranks, with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return loop counters, callback states and descriptions of logged metrics, as plain values."""
        trainer = self._trainer
        return {
            "loops": counters(trainer),
            "callbacks": _call_callbacks_state_dict(trainer),
            "folders": {callback.state_key: str(path) for callback, path in _folders(trainer)},
            "logged": [_described(each) for each in trainer.fit_loop.epoch_loop._results.values() if _is_live(each)],
            "should_stop": bool(trainer.should_stop),
            "saved": _saving(trainer),
            "metrics": {name: float(value) for name, value in _last_values(trainer).items() if _is_number(value)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a trainer's state received from another rank or a checkpoint."""
        theirs: Any = self._trainer
        set_counters(theirs, state["loops"])
        theirs.should_stop = state["should_stop"]
        _set_saving(theirs, state["saved"])
        _last_values(theirs).update({name: torch.tensor(value) for name, value in state["metrics"].items()})
        for theirs, path in _folders(self._trainer):
            theirs.dirpath = state["folders"].get(theirs.state_key, path)
        _call_callbacks_load_state_dict(self._trainer, {"callbacks": state["callbacks"]})
        for each in state["logged"]:
            _read_logged(self._trainer, each)


def _is_number(value: Any) -> bool:
    """True if a metric is a tensor with one element, or a number that user code has written."""
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


class StepState:
    """Trainer state of one rank that is rolled back when a step is repeated."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def remember(self) -> dict[str, Any]:
        """Return the trainer's current state on this rank, for :meth:`roll_back`; the caller must copy it."""
        trainer = self._trainer
        results = trainer.fit_loop.epoch_loop._results
        return {
            "loops": counters(trainer),
            "callbacks": _call_callbacks_state_dict(trainer),
            "should_stop": bool(trainer.should_stop),
            "saved": _saving(trainer),
            "logged": {key: each._copy_state_dict() for key, each in results.items() if each.is_tensor},
            "metrics": [(each._copy_state_dict(), each._update_count) for each in metrics_of(trainer)],
        }

    def roll_back(self, remembered: dict[str, Any]) -> None:
        """Restore the trainer's state that :meth:`remember` returned before the repeated step."""
        set_counters(self._trainer, remembered["loops"])
        _call_callbacks_load_state_dict(self._trainer, {"callbacks": remembered["callbacks"]})
        theirs: Any = self._trainer
        theirs.should_stop = remembered["should_stop"]
        _set_saving(theirs, remembered["saved"])
        results = self._trainer.fit_loop.epoch_loop._results
        for key in results.keys() - remembered["logged"].keys():
            if results[key].is_tensor:
                results[key].reset()
        for key, values in remembered["logged"].items():
            _set_values(results[key], values)
        for theirs, (values, updates) in zip(metrics_of(self._trainer), remembered["metrics"], strict=True):
            _set_values(theirs, values)
            theirs._update_count = updates


def _last_values(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the last values of logged metrics, which schedulers, callbacks and code after ``fit`` read."""
    found: dict[str, torch.Tensor] = trainer._logger_connector._callback_metrics
    return found


def counters(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's loop counters (batches, steps and epochs started and completed) as plain values."""
    epochs: Any = trainer.fit_loop
    batches: Any = epochs.epoch_loop
    return {
        **{name: progress.state_dict() for name, progress in _progresses(trainer)},
        "stepped": batches._batches_that_stepped,
        "moved": batches.moved_epochs,
        "max_batches": float(epochs.max_batches),
    }


def set_counters(trainer: Trainer, values: dict[str, Any]) -> None:
    """Set the trainer's loop counters to values returned by :func:`counters`."""
    for name, progress in _progresses(trainer):
        _fill(progress, values[name])
    theirs: Any = trainer.fit_loop.epoch_loop
    theirs._batches_that_stepped = values["stepped"]
    theirs.moved_epochs = values["moved"]
    batches = theirs.batch_progress.current.ready
    theirs = trainer.fit_loop._data_fetcher
    theirs.fetched = batches
    theirs = trainer.fit_loop
    most = values["max_batches"]
    theirs.max_batches = int(most) if most < float("inf") else most


def metrics_of(trainer: Trainer) -> Iterator[torchmetrics.Metric]:
    """Yield the torchmetrics objects that the trainer's model holds."""
    for module in trainer.lightning_module.modules():
        if isinstance(module, torchmetrics.Metric):
            yield module


def _progresses(trainer: Trainer) -> Iterator[tuple[str, _BaseProgress]]:
    loop = trainer.fit_loop.epoch_loop
    yield "batches", loop.batch_progress
    yield "schedulers", loop.scheduler_progress
    yield "automatic", loop.automatic_optimization.optim_progress
    yield "manual", loop.manual_optimization.optim_step_progress


def _fill(theirs: Any, values: dict[str, Any]) -> None:
    """Set the fields of a progress object in place, recursing into nested progress objects."""
    for name, value in values.items():
        if isinstance(value, dict):
            _fill(getattr(theirs, name), value)
        else:
            setattr(theirs, name, value)


def _saving(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return what each callback has saved last and is about to save, which its own state does not contain."""
    found = {
        each.state_key: {name: getattr(each, name) for name in _SAVING if hasattr(each, name)}
        for each in trainer.callbacks
    }
    return {key: values for key, values in found.items() if values}


def _set_saving(trainer: Any, values: dict[str, dict[str, Any]]) -> None:
    for each in trainer.callbacks:
        vars(each).update(values.get(each.state_key, {}))


def _folders(trainer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the callbacks that save to a folder, with the folder, which must be the same on all ranks."""
    for callback in trainer.callbacks:
        if getattr(callback, "dirpath", None) is not None:
            yield callback, callback.dirpath


def _is_live(metric: _ResultMetric) -> bool:
    """True if this epoch still averages the metric and other ranks can recreate it from a value or an attribute."""
    return not metric.has_reset and (metric.is_tensor or metric.meta.metric_attribute is not None)


def _described(metric: _ResultMetric) -> dict[str, Any]:
    """Return the name, averaging settings and attribute that other ranks need to recreate the metric."""
    meta = metric.meta
    return {
        "attribute": None if metric.is_tensor else meta.metric_attribute,
        **{name: getattr(meta, name) for name in _META},
        "reduce_fx": meta.reduce_fx.__name__,
        "synced": bool(meta.sync.should),
        "rank_zero_only": meta.sync.rank_zero_only,
    }


def _read_logged(trainer: Trainer, described: dict[str, Any]) -> None:
    """Add a metric that other ranks logged in this epoch, so that this rank participates in averaging it."""
    results = trainer.fit_loop.epoch_loop._results
    key = f"{described['fx']}.{described['name']}"
    if key in results or not described["on_epoch"]:
        return
    meta = _Metadata(**{name: described[name] for name in _META}, reduce_fx=getattr(torch, described["reduce_fx"]))
    meta.sync = _Sync(
        _should=described["synced"], fn=trainer.strategy.reduce, rank_zero_only=described["rank_zero_only"]
    )
    theirs: Any = _ResultMetric(meta, is_tensor=described["attribute"] is None)
    if not theirs.is_tensor:
        meta.metric_attribute = described["attribute"]
        theirs.value = trainer.lightning_module.get_submodule(described["attribute"])
    theirs._update_count = 1  # it stands for no value, but is one of those that are averaged
    results[key] = theirs.to(trainer.strategy.root_device)
    theirs = trainer._logger_connector
    theirs._first_loop_iter = False  # else the first value that this rank logs would reset the others


def _set_values(theirs: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(theirs, name, value)
    theirs._computed = None
