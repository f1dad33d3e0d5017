"""Patches of the user's optimizer, scheduler and scaler, and of the backward pass (torch)."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.run.current import session_of_thread
from elastic_ray.run.registry import HookPoint
from elastic_ray.steps.out_of_memory import free_caches, is_out_of_memory
from elastic_ray.sync.device_numbers import local

if TYPE_CHECKING:
    from elastic_ray.communication.unit_group import UnitGroup
    from elastic_ray.run.run import Run
    from elastic_ray.steps.ledger import StepLedger
    from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer
    from elastic_ray.sync.sharded_parameters.sharded_optimizer import OptimizerPart


_installed = False  # the watch of backward passes
SEESAW = "seesaw"
SCHEDULES = ("progress", "steps", SEESAW)


def watch_backward() -> None:
    """Patch torch's backward so that a wrapped model that runs out of memory skips the step instead of raising."""
    global _installed
    if _installed:
        return
    _installed, original = True, torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            session = session_of_thread() if is_out_of_memory(error) else None
            if session is None or not session.run.run_out_of_memory():
                raise
            error.__traceback__ = None
        else:
            return
        free_caches()
        session.registry.call(HookPoint.BACKWARD_LOST)

    setattr(torch.autograd, "backward", backward)  # noqa: B010


def patch_step(optimizer: torch.optim.Optimizer, step: Any) -> None:
    """Route ``optimizer.step`` through ``step(original, closure, **kwargs)``, keeping its name and signature.

    The patched method remains a bound method, because schedulers created later inspect it.
    """
    original = optimizer.step

    @functools.wraps(original)
    def wrapped(self: Any, closure: Any = None, **kwargs: Any) -> Any:
        return step(original, closure, **kwargs)

    optimizer.step = types.MethodType(wrapped, optimizer)  # type: ignore[method-assign]


def patch_zero_grad(optimizer: torch.optim.Optimizer, then: Callable[[], None]) -> None:
    """Call ``then`` each time the optimizer has cleared its parameters' gradients."""
    original = optimizer.zero_grad

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        then()

    optimizer.zero_grad = wrapped  # type: ignore[method-assign]


def patch_state_dict(optimizer: torch.optim.Optimizer, divided: TiledOptimizer | OptimizerPart) -> None:
    """Make ``optimizer.state_dict`` return, and ``load_state_dict`` accept, the state divided between the ranks."""
    give, load = optimizer.state_dict, optimizer.load_state_dict

    @functools.wraps(give)
    def state_dict(*args: Any, **kwargs: Any) -> Any:
        states = divided.whole_states()
        if states is None:
            return give(*args, **kwargs)
        optimizer.state.update(states)
        try:
            return give(*args, **kwargs)
        finally:
            for param in states:
                del optimizer.state[param]

    @functools.wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        divided.loaded()

    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def check_schedule(schedule: Any) -> None:
    """Raise ValueError unless ``schedule`` is one of ``SCHEDULES``, the units that schedulers count in."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, but got {schedule!r}")


def count_optimizer_steps(scheduler: Any, ledger: StepLedger, schedule: str) -> None:
    """Make a scheduler that is stepped with every batch count optimizer steps instead of micro-steps.

    With ``"progress"``, an optimizer step counts as the number of steps that the initial batch size would need for the
    same samples. A call with arguments (a metric, an epoch) always counts as one step.
    """
    if not hasattr(scheduler, "step"):
        return
    original = type(scheduler).step
    counted: list[Any] = [None, 0]  # the latest step of this rank's own in which it stepped, and how often

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = ledger.outermost
        if ledger.accumulating or (now is not None and now.taken):
            return None
        if now is not None and not (now.given or args or kwargs):
            counted[:] = now, counted[1] + 1 if counted[0] is now else 1
        if schedule == SEESAW and (args or kwargs):
            raise ValueError(
                f"schedule={SEESAW!r} cannot read a scheduler that is stepped with arguments (a metric, an epoch), but "
                f"{type(self).__name__}.step() got {args or kwargs}: call step(), or use schedule='progress'"
            )
        if schedule == "steps" or args or kwargs:
            return original(self, *args, **kwargs)
        for _ in range(ledger.initial_steps):
            original(self)
        return None

    _override(scheduler, step=step)

    def move_on() -> None:
        for _ in range(counted[1]):
            scheduler.step()

    ledger.on_given.append(move_on)


def scale_rollback(scaler: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return two functions, to capture an AMP scaler's scale and to restore it; neither waits for the GPU."""
    return functools.partial(_unread_scale, scaler), functools.partial(_undo_scale, scaler)


def _unread_scale(scaler: Any) -> Any:
    """Return the scaler's scale without reading it from the GPU, as ``state_dict()`` would."""
    scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    if isinstance(scale, torch.Tensor) and isinstance(tracker, torch.Tensor):
        return scale.clone(), tracker.clone()
    return scaler.state_dict()  # it was not used yet


def _undo_scale(scaler: Any, kept: Any) -> None:
    """Restore a scale that a scaler had before."""
    if isinstance(kept, tuple):
        for present, before in zip((scaler._scale, scaler._growth_tracker), kept, strict=True):
            present.copy_(before)
    else:
        scaler.load_state_dict(kept)


def patch_scaler(scaler: Any, run: Run) -> None:
    """Make an AMP scaler keep its scale while gradients accumulate, and agree on overflows with its unit's workers."""
    _keep_scale_while_accumulating(scaler, run.ledger)
    if run.unit is not None and scaler.is_enabled():
        _agree_on_overflow(scaler, run.unit)


def _keep_scale_while_accumulating(scaler: Any, ledger: StepLedger) -> None:
    """Keep the loss scale constant while gradients accumulate, so that it changes only with optimizer steps."""
    original = type(scaler).update

    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        before = _unread_scale(self) if ledger.accumulating else None
        original(self, *args, **kwargs)
        if before is not None:
            _undo_scale(self, before)

    _override(scaler, update=update)


def _agree_on_overflow(scaler: Any, unit: UnitGroup) -> None:
    """Skip an update on all workers of a unit if gradients overflowed on any of them, checking each worker's part."""
    original = type(scaler)._unscale_grads_

    @functools.wraps(original)
    def unscale(self: Any, optimizer: Any, inv_scale: Any, found_inf: torch.Tensor, *args: Any) -> Any:
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        parts = [local(p).detach() for p in held]
        for part, p in zip(parts, held, strict=True):
            part.grad = local(p.grad)
        found = original(self, _Parts([{"params": parts}]), inv_scale, found_inf, *args)
        seen = [row[0] for row in unit.gather([max(map(float, found.values()), default=-1.0)])]
        if max(seen) < 0:
            return found  # no worker has gradients, as torch says
        found = found or {found_inf.device: found_inf}
        if max(seen) > 0:
            for each in found.values():
                each.fill_(1.0)
        return found

    _override(scaler, _unscale_grads_=unscale)


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """An optimizer's parameters in the form that a scaler reads."""

    param_groups: list[dict[str, Any]]


def after_step(scaler: Any, optimizer: torch.optim.Optimizer, then: Callable[[], None]) -> None:
    """Call ``then`` whenever the scaler has stepped this optimizer or skipped its step because of an overflow."""
    original = type(scaler).step

    @functools.wraps(original)
    def step(self: Any, stepped: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, stepped, *args, **kwargs)
        if stepped is optimizer:
            then()
        return result

    _override(scaler, step=step)


def _override(target: Any, **methods: Any) -> None:
    """Override methods of one object by changing its class, since a scheduler's attributes enter its state dict.

    Copies and pickles of the object have its original class.
    """
    kind = type(target)
    before: Any = kind.__reduce_ex__

    def reduce(self: Any, protocol: Any) -> Any:
        plain = before(self, protocol)
        return (object.__new__, (kind,), *plain[2:]) if plain[1][:1] == (type(self),) else plain

    own = {"__module__": kind.__module__, "__reduce_ex__": reduce}
    target.__class__ = type(kind.__name__, (kind,), {**own, **methods})


def complete(optimizer: torch.optim.Optimizer) -> None:
    """Add torch's hooks to an optimizer that does not call ``Optimizer.__init__``, as some Lookaheads do not.

    Raises TypeError if the optimizer lacks an attribute that every optimizer has; the message names it.
    """
    missing = [name for name in ("param_groups", "state", "defaults") if not hasattr(optimizer, name)]
    if missing:
        raise TypeError(
            f"optimizer must have {', '.join(missing)}, but {type(optimizer).__name__} has not: call "
            "super().__init__(params, defaults) in its __init__, or set them there"
        )
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        torch.optim.Optimizer.__setstate__(optimizer, {})


def inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers with separate state that ``optimizer`` wraps, keyed by the attribute that holds them."""
    return {
        name: each
        for name, each in vars(optimizer).items()
        if isinstance(each, torch.optim.Optimizer) and each is not optimizer and each.state is not optimizer.state
    }


_SEVERAL = (
    "optimizer.step(closure) may evaluate the model once a step, but this optimizer calls the closure several times, "
    "which AdaptiveDataParallel cannot replicate: each evaluation would be a step of its own on all workers. Use an "
    "optimizer that needs one gradient a step"
)


_TWO_PASSES = (
    "{name} takes two gradients a step, the second at parameters that it has moved for it, which AdaptiveDataParallel "
    "cannot replicate: a step that a lost worker voids would leave the moved ones behind. Use its inner optimizer "
    "alone, torch.optim.SGD or AdamW; an average of the weights (torch.optim.swa_utils.AveragedModel) also finds flat "
    "minima, see docs/recipes.md"
)


def refuse_several_evaluations(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose step evaluates the model several times (L-BFGS, SAM)."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(_SEVERAL)
    if callable(getattr(optimizer, "first_step", None)) and callable(getattr(optimizer, "second_step", None)):
        raise ValueError(_TWO_PASSES.format(name=type(optimizer).__name__))


def evaluated(
    optimizer: torch.optim.Optimizer, closure: Callable[[], Any], arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Call an optimizer step's closure before the update; return its value, and new arguments for the step.

    The new arguments contain a closure that only returns the known value. When ranks decide if and at what rate to
    apply gradients, they therefore see the entire group's gradients.

    Raises ValueError, in the optimizer's step, if the optimizer calls the closure several times, or after changing
    parameters.
    """
    with torch.enable_grad():
        value = closure()
    return value, {**arguments, "closure": _Once(optimizer, value)}


class _Once:
    """Stand-in for a closure that has already been called; the first call returns its value."""

    def __init__(self, optimizer: torch.optim.Optimizer, value: Any) -> None:
        self._value, self._asked = value, False
        self._name = type(optimizer).__name__
        params = (p for group in optimizer.param_groups for p in group["params"])
        self._param = next((p for p in params if p.grad is not None), None)
        self._version = self._param._version if self._param is not None else 0

    def __call__(self) -> Any:
        if self._asked:
            raise ValueError(_SEVERAL)
        if self._param is not None and (self._param.grad is None or self._param._version != self._version):
            raise ValueError(_TWO_PASSES.format(name=self._name))
        self._asked = True
        return self._value


_NEAR = 16  # frames
_SCALER_FILE = torch.amp.GradScaler.step.__code__.co_filename

_NOT_GIVEN = (
    "a GradScaler steps the optimizer of a model that was wrapped without it: its scale reaches no worker that joins, "
    "whose gradients would be added up with another one, nor the job's checkpoints, and gradient statistics are too "
    "large by it. Pass it as AdaptiveDataParallel(model, optimizer, grad_scaler=scaler)"
)


def check_scaler(run: Run) -> None:
    """Check that every enabled scaler that calls the optimizer's step is part of the run's state.

    Raises RuntimeError if a scaler is not part of the state and the group may change. If the group is fixed, only warn.
    """
    frame = sys._getframe(1)
    for _ in range(_NEAR):
        # Of no other frame: reading its locals keeps them alive, and an iterator of the user's must end in time.
        scaler = frame.f_locals.get("self") if frame.f_code.co_filename == _SCALER_FILE else None
        if isinstance(scaler, torch.amp.GradScaler):
            if not scaler.is_enabled() or run.states.holds(scaler):
                return  # user code has registered it, or passed it with another model
            if run.elastic:
                raise RuntimeError(_NOT_GIVEN)
            run.notify("warning", _NOT_GIVEN)
            return
        if frame.f_back is None:
            return
        frame = frame.f_back
