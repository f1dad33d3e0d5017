"""Base class of adaptation policies, and the thread that calls their hooks (pure)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from elastic_ray.adaptation.requests import Request
from elastic_ray.adaptation.view import PolicyView

Answer: TypeAlias = "Request | Iterable[Request] | None"

_SETTINGS = {"watches", "strict", "deadline_s"}


class PolicyError(RuntimeError):
    """Error raised if a strict policy fails, makes an invalid request, times out, or differs between ranks."""


class Policy:
    """Base class of control loops over a run (KungFu's ``BasePolicy``); override the hooks that you need.

    Each hook receives a :class:`PolicyView` and returns one request, several, or None. Every rank calls its own copy of
    the policy with an equal view. A hook must therefore decide from the view and its own attributes only, never from a
    clock or random numbers; the view provides elapsed time and sample counts. Requests are compared across ranks in the
    next step. If all ranks make the same request, it is applied on all of them after that step. Otherwise it is applied
    on none of them, and the policy is not called again.

    Attributes that a hook changes form the policy's state. Joining workers receive the state, checkpoints include it,
    and it is rolled back if the step is lost or the hook fails. It must consist of numbers, strings, None, or lists,
    tuples and dicts of these; otherwise, override :meth:`state_dict` and :meth:`load_state_dict`.

    Attributes:
        watches: names of metrics, as passed to ``elastic_ray.report``, to include in the view (numbers only).
        strict: if True, an error, an invalid or refused request, or a disagreement between ranks ends the job.
            Otherwise the job continues without the request, and an event of kind ``policy`` reports it.
        deadline_s: maximum time a hook may run [s]; a policy whose hook takes longer is not called again.
        owns_batch: if True, other policies' requests for a batch size are ignored.
        starts_at_initial: if True, the run starts with the loader's batch, even if similar jobs ran best with a
            different batch, and keeps it until a policy sets another one; ``SetBatch(None)`` lets the job choose.

    Examples:
        >>> from elastic_ray.adaptation import Policy, PolicyView, Resize
        >>> class Grow(Policy):
        ...     def after_epoch(self, view):
        ...         return [Resize(to=view.workers + 1)]
        ...
        >>> Grow().after_epoch(PolicyView(workers=2))
        [Resize(to=3, min=None, max=None)]
    """

    owns_batch: bool = False
    starts_at_initial: bool = False
    watches: Sequence[str] = ()
    strict: bool = False
    deadline_s: float = 10.0

    def before_train(self, view: PolicyView) -> Answer:
        """Return requests before the run's first step; not called when resuming from a checkpoint."""
        return None

    def before_epoch(self, view: PolicyView) -> Answer:
        """Return requests at the start of an epoch; called once per epoch."""
        return None

    def before_step(self, view: PolicyView) -> Answer:
        """Return requests before a step of the training loader; called again if the step is lost and drawn again."""
        return None

    def after_step(self, view: PolicyView) -> Answer:
        """Return requests after a step that has been committed on all ranks."""
        return None

    def after_epoch(self, view: PolicyView) -> Answer:
        """Return requests when an epoch ends."""
        return None

    def after_train(self, view: PolicyView) -> Answer:
        """Return requests after the train function has returned; only ``Report`` requests still have an effect."""
        return None

    def coming_batches(self, view: PolicyView) -> Sequence[tuple[float, int]]:
        """Return known future batch sizes as pairs (samples from now, batch size), for the allocator's planning."""
        return ()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the policy's state as plain values; by default, the instance's attributes."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned on this rank or another one."""
        if type(self).state_dict is Policy.state_dict:  # a lost step may have made attributes
            for name in vars(self).keys() - state.keys() - _SETTINGS:
                delattr(self, name)
        vars(self).update(state)


def overrides(policy: Policy, hook: str) -> bool:
    """True if the policy's class overrides the ``Policy`` method called ``hook``."""
    return getattr(type(policy), hook) is not getattr(Policy, hook) or hook in vars(policy)


def check_policies(given: object) -> tuple[Policy, ...]:
    """Return the user's policies as a tuple; ``given`` is one policy, several, or None."""
    if given is None:
        return ()
    listed = (given,) if isinstance(given, (Policy, type)) or not isinstance(given, Iterable) else tuple(given)
    for policy in listed:
        if isinstance(policy, type) and issubclass(policy, Policy):
            raise TypeError(f"policies must be instances of Policy, but got the class {policy.__name__}: call it")
        if not isinstance(policy, Policy):
            raise TypeError(f"policies must be instances of elastic_ray.adaptation.Policy, but got {policy!r}")
        if not isinstance(policy.strict, bool):
            raise TypeError(f"{name_of(policy)}.strict must be True or False, but got {policy.strict!r}")
        if not policy.deadline_s > 0:
            raise ValueError(f"{name_of(policy)}.deadline_s must be above 0 seconds, but got {policy.deadline_s}")
        if isinstance(policy.watches, str):
            raise TypeError(f"{name_of(policy)}.watches must be a tuple of names, but got {policy.watches!r}")
    return listed


def name_of(policy: Policy) -> str:
    """Return the name used for a policy in events."""
    return type(policy).__name__


class HookTimeoutError(TimeoutError):
    """Error raised if a hook does not return within its deadline."""


class HookCaller:
    """Background thread that calls policies' hooks one at a time, each with a deadline; :meth:`close` ends it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def call(self, hook: Callable[[], Any], timeout_s: float) -> Any:
        """Call ``hook`` in this object's background thread, and return its result or raise its error.

        If the hook does not return in time, its thread is left running and the next call uses a new thread.
        """
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="policies", daemon=True).start()
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((hook(), None))
            except Exception as error:
                answer.put((None, error))
            except BaseException as error:  # such as SystemExit: the hook's, not this process's
                answer.put((None, RuntimeError(f"it raised {type(error).__name__}: {error}")))

        self._calls.put(run)
        try:
            value, error = answer.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise HookTimeoutError(f"it has not returned within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread as soon as its current hook returns."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
