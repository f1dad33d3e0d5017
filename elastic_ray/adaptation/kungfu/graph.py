"""What hooks of KungFu's policies compute with: operations, variables and the session that runs them (pure)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elastic_ray.adaptation.requests import Request, Resize
from elastic_ray.adaptation.schedule import parse_schedule, value_at
from elastic_ray.adaptation.view import PolicyView


class GraphKeys:
    """Names of KungFu's variables."""

    BATCH_SIZE = "kungfu_batch_size"
    GRADIENT_NOISE_SCALE = "kungfu_gradient_noise_scale"
    TOTAL_SAMPLES = "kungfu_total_samples"
    TRAINED_SAMPLES = "kungfu_trained_samples"


class Op:
    """A value that a session computes, as an operation of TensorFlow's graph.

    Args:
        compute: gets the session, the inputs' values and the state; returns the value and the state after it.
        inputs: operations or plain values that it is computed from.
        initial: the state that it begins with; None for none.
    """

    def __init__(
        self, compute: Callable[[Session, list[Any], Any], tuple[Any, Any]], *inputs: Any, initial: Any = None
    ) -> None:
        self._compute = compute
        self._initial = self.state = initial
        self.inputs = inputs

    def value(self, sess: Session, feed: Mapping[Any, Any]) -> Any:
        """What it is now; a value that is fed takes its place."""
        if self in feed:
            return feed[self]
        values = [each.value(sess, feed) if isinstance(each, Op) else each for each in self.inputs]
        found, self.state = self._compute(sess, values, self.state)
        return found

    def restore(self, state: Any) -> None:
        """Go on from a state; None is the initial one."""
        self.state = self._initial if state is None else state


class Session:
    """What hooks get as ``sess``.

    Args:
        view: the run between two steps.
        variables: KungFu's variables by name; a setter changes them.

    Attributes:
        view: the same.
        variables: the same.
        asked: requests of the hooks so far.
    """

    def __init__(self, view: PolicyView, variables: dict[str, Any]) -> None:
        self.view, self.variables = view, variables
        self.asked: list[Request] = []

    def run(self, fetched: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """The value of an operation, or of each of several.

        Args:
            fetched: an operation, or a list of them.
            feed_dict: values in place of operations, as of placeholders.

        Raises:
            RuntimeError: a placeholder was not fed.
        """
        if isinstance(fetched, (list, tuple)):
            return [self.run(each, feed_dict) for each in fetched]
        return fetched.value(self, feed_dict or {})

    def resize(self, workers: int) -> bool:
        """Ask for so many workers; whether that is another number than now."""
        if workers != self.view.workers:
            self.asked.append(Resize(to=workers))
        return bool(workers != self.view.workers)


_SESSION: contextvars.ContextVar[Session | None] = contextvars.ContextVar("kungfu session", default=None)


@contextlib.contextmanager
def session(view: PolicyView, variables: dict[str, Any]) -> Iterator[Session]:
    """A session for hooks; also for functions that get none."""
    sess = Session(view, variables)
    token = _SESSION.set(sess)
    try:
        yield sess
    finally:
        _SESSION.reset(token)


def _current(what: str) -> Session:
    found = _SESSION.get()
    if found is None:
        raise RuntimeError(f"{what} is for hooks that get a session: before_train comes before there is one")
    return found


# -- operations ----------------------------------------------------------------------------------------------


def placeholder(dtype: Any = None, shape: Any = None) -> Op:
    """A value that ``feed_dict`` gives; type and shape are not looked at."""

    def missing(sess: Session, inputs: list[Any], state: Any) -> tuple[Any, Any]:
        raise RuntimeError("a placeholder was not fed: sess.run(op, feed_dict={placeholder: value})")

    return Op(missing)


def get_global_step() -> Op:
    """Committed steps."""
    return Op(lambda sess, inputs, state: (sess.view.step, None))


def counter(init: int = 0, incr: int = 1) -> Op:
    """``init``, then ``incr`` more each time it is run."""
    return Op(lambda sess, inputs, state: (state, state + incr), initial=init)


def exponential_moving_average(x: Any, alpha: float = 0.9) -> Op:
    """y = alpha * y + (1 - alpha) * x each time it is run; x the first time."""

    def average(sess: Session, inputs: list[Any], state: Any) -> tuple[Any, Any]:
        mean = inputs[0] if state is None else alpha * state + (1 - alpha) * inputs[0]
        return mean, mean

    return Op(average, x)


def step_based_schedule(config: str, step: Any = None) -> Op:
    """The value of a schedule ``"value:steps,value:steps"``, 1 after its end.

    Args:
        config: for example ``"10:2,100:4"``: 10 for two steps, then 100 for four.
        step: where it stands; None counts how often it is run.

    Raises:
        ValueError: the schedule has another form.
    """
    schedule = parse_schedule(config)
    return Op(
        lambda sess, inputs, state: (value_at(schedule, inputs[0], after=1), None),
        counter() if step is None else step,
    )


def resize(size: Any) -> Any:
    """Ask for ``size`` workers. All workers that join get the state by themselves.

    Args:
        size: an operation or a placeholder; then it returns an operation, whose value is whether that is another
            number than now. Or a number, within a hook; then it asks at once and returns (changed, detached), of which
            the latter is False: a worker that leaves does so between two steps, and runs no more hooks.
    """
    if isinstance(size, Op):
        return Op(lambda sess, inputs, state: (sess.resize(int(inputs[0])), None), size)
    return _current("resize(number)").resize(size), False


def BroadcastGlobalVariablesOp() -> Op:
    """Nothing: workers that join have received the state before their first step."""
    return Op(lambda sess, inputs, state: (None, None))


def current_cluster_size() -> int:
    """Workers of the present group; within a hook."""
    return _current("current_cluster_size()").view.workers


# -- variables -----------------------------------------------------------------------------------------------

_READ: Mapping[str, Callable[[Session], Any]] = {
    GraphKeys.BATCH_SIZE: lambda sess: (
        sess.variables[GraphKeys.BATCH_SIZE] or max(1, round(sess.view.batch_size / sess.view.workers))
    ),
    GraphKeys.GRADIENT_NOISE_SCALE: lambda sess: sess.view.noise_scale or 0.0,
    GraphKeys.TOTAL_SAMPLES: lambda sess: sess.variables[GraphKeys.TOTAL_SAMPLES],
    GraphKeys.TRAINED_SAMPLES: lambda sess: sess.view.samples,
}


class _Variable(Op):
    """One of KungFu's variables."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda sess, inputs, state: (_READ[name](sess), None))
        self.name = name


def get_global_variable(name: str) -> Op:
    """A variable of :class:`GraphKeys`; the noise scale is 0 before it is measured.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _READ:
        raise ValueError(f"a variable must be one of {', '.join(_READ)}, but got {name!r}")
    return _Variable(name)


def get_or_create_batch_size(init: int | None = None) -> Op:
    """Samples of one worker's step; ``PolicyHook(init_batch_size=)`` says what it begins with."""
    return get_global_variable(GraphKeys.BATCH_SIZE)


def eval_global_variable(name: str, sess: Session) -> Any:
    """The value of a variable."""
    return sess.run(get_global_variable(name))


def eval_batch_size(sess: Session) -> int:
    """Samples of one worker's step."""
    return int(eval_global_variable(GraphKeys.BATCH_SIZE, sess))


def eval_gradient_noise_scale(sess: Session) -> float:
    """The gradient noise scale [samples], 0 before it is measured."""
    return float(eval_global_variable(GraphKeys.GRADIENT_NOISE_SCALE, sess))


def create_setter(variable: Op) -> Callable[[Session, int], None]:
    """A function that sets the batch of a worker, or the samples after which the training ends.

    Raises:
        ValueError: the run itself measures this variable.
    """
    name = getattr(variable, "name", "")
    if name not in (GraphKeys.BATCH_SIZE, GraphKeys.TOTAL_SAMPLES):
        raise ValueError(f"{name or 'this operation'} cannot be set: only the batch size and the total samples can")

    def set_value(sess: Session, value: int) -> None:
        sess.variables[name] = int(value)

    return set_value
