"""KungFu's policies as one policy of a run (pure)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.adaptation.kungfu.graph import GraphKeys, Op, Session, session
from elastic_ray.adaptation.policy import Answer, Policy
from elastic_ray.adaptation.requests import Request, SetBatch, Stop
from elastic_ray.adaptation.view import PolicyView


class BasePolicy:
    """KungFu's base class; override the hooks that are needed. ``before_epoch`` may leave out ``sess``.

    ``before_train`` is called when the :class:`PolicyHook` is made, on every worker, also one that joins later. What
    the other hooks change of the policy's attributes is shared: plain values and operations, as ``Policy`` says.
    """

    def before_train(self) -> None:
        """Make operations and attributes."""

    def before_epoch(self, sess: Session) -> None:
        """An epoch begins: ``epoch_size`` samples."""

    def before_step(self, sess: Session) -> None:
        """A step begins."""

    def after_step(self, sess: Session) -> None:
        """A step was committed on all workers."""

    def after_epoch(self, sess: Session) -> None:
        """An epoch is over."""

    def after_train(self, sess: Session) -> None:
        """The training is over."""


class PolicyHook(Policy):
    """Runs KungFu's policies as one policy of a run; hooks named ``after`` in reverse order.

    It stops the training after epoch_size * epoch_num samples, if the loop has not ended by then.

    Args:
        policies: one or more.
        epoch_size: samples of an epoch.
        epoch_num: epochs.
        init_batch_size: samples of one worker's step to begin with; None leaves the loader's. From then on, and
            whenever a policy sets the batch, it stays with the worker when the number of workers changes, as far as
            the loader allows (``autoscale_batch_size``).
        strict: see ``Policy``.
        deadline_s: see ``Policy`` [s].

    Raises:
        TypeError: a policy is no ``BasePolicy``.
        ValueError: a number is below 1.
    """

    def __init__(
        self,
        policies: Sequence[BasePolicy],
        epoch_size: int,
        epoch_num: float,
        init_batch_size: int | None = None,
        *,
        strict: bool = False,
        deadline_s: float = 2.0,
    ) -> None:
        self.strict, self.deadline_s = strict, deadline_s
        self._policies = list(policies)
        for policy in self._policies:
            if not isinstance(policy, BasePolicy):
                raise TypeError(f"PolicyHook(policies) must be instances of kungfu.BasePolicy, but got {policy!r}")
        for name, value in (("epoch_size", epoch_size), ("epoch_num", epoch_num), ("init_batch_size", init_batch_size)):
            if value is not None and not value >= 1:
                raise ValueError(f"PolicyHook({name}) must be 1 or more, but got {value}")
        self._epoch_size = epoch_size
        self._variables: dict[str, Any] = {
            GraphKeys.BATCH_SIZE: init_batch_size,
            GraphKeys.TOTAL_SAMPLES: int(epoch_size * epoch_num),
        }
        self._epoch = -1
        self._held: int | None = None
        for policy in self._policies:
            policy.before_train()

    def before_step(self, view: PolicyView) -> Answer:
        """``before_epoch`` where an epoch begins, then ``before_step``."""
        with session(view, self._variables) as sess:
            epoch = view.samples // self._epoch_size
            if epoch > self._epoch:
                self._call("before_epoch", sess, self._policies)
                self._epoch = epoch
            self._call("before_step", sess, self._policies)
        return self._answer(sess)

    def after_step(self, view: PolicyView) -> Answer:
        """``after_step``, and ``after_epoch`` where one is over."""
        with session(view, self._variables) as sess:
            self._call("after_step", sess, self._policies[::-1])
            if view.samples // self._epoch_size > self._epoch:
                self._call("after_epoch", sess, self._policies[::-1])
        asked = self._answer(sess)
        # It is applied after the next step.
        if view.samples + view.batch_size >= self._variables[GraphKeys.TOTAL_SAMPLES]:
            asked.append(Stop(f"{self._variables[GraphKeys.TOTAL_SAMPLES]} samples are trained"))
        return asked

    def after_train(self, view: PolicyView) -> Answer:
        """``after_train``."""
        with session(view, self._variables) as sess:
            self._call("after_train", sess, self._policies[::-1])
        return None

    def _call(self, hook: str, sess: Session, policies: Sequence[BasePolicy]) -> None:
        for policy in policies:
            method = getattr(policy, hook)
            method(sess) if inspect.signature(method).parameters else method()

    def _answer(self, sess: Session) -> list[Request]:
        """What was asked for in a session, and the batch that follows from the number of workers."""
        batch = self._variables[GraphKeys.BATCH_SIZE]
        if batch is not None and batch * sess.view.workers != (self._held or sess.view.batch_size):
            self._held = batch * sess.view.workers
            sess.asked.append(SetBatch(self._held))
        return sess.asked

    def state_dict(self) -> dict[str, Any]:
        """Variables, and of each policy its attributes and its operations' states."""
        return {
            "variables": dict(self._variables),
            "epoch": self._epoch,
            "held": self._held,
            "policies": [
                {name: value for name, value in vars(policy).items() if not _is_code(value)}
                for policy in self._policies
            ],
            "ops": [{where: op.state for where, op in _ops(policy).items()} for policy in self._policies],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._variables, self._epoch, self._held = dict(state["variables"]), state["epoch"], state["held"]
        for policy, attributes, states in zip(self._policies, state["policies"], state["ops"], strict=True):
            for name in [name for name, value in vars(policy).items() if not _is_code(value)]:
                delattr(policy, name)
            vars(policy).update(attributes)
            for where, op in _ops(policy).items():
                op.restore(states.get(where))


def _is_code(value: Any) -> bool:
    """Whether an attribute is an operation or a function, which every worker makes by itself."""
    return isinstance(value, Op) or callable(value)


def _ops(policy: BasePolicy) -> dict[str, Op]:
    """The operations of a policy's attributes, and what they are computed from, by name."""
    found: dict[str, Op] = {}
    left = [(name, value) for name, value in vars(policy).items() if isinstance(value, Op)]
    while left:
        name, op = left.pop()
        found[name] = op
        left += [(f"{name}.{place}", each) for place, each in enumerate(op.inputs) if isinstance(each, Op)]
    return found
