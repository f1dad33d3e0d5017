"""Caller of a run's policies on one rank, which keeps their state and applies requests made by all ranks.

Every rank calls its own copies of the policies with equal views. The sums that ranks exchange in each step show whether
all of them made the same requests. Until they have been compared, requests are pending.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.adaptation.policy import HookCaller, HookTimeoutError, Policy, PolicyError, name_of, overrides
from elastic_ray.adaptation.requests import Report, Request, SetBatch, from_plain, is_request, to_plain
from elastic_ray.adaptation.view import PolicyView, WatchedMetrics

if TYPE_CHECKING:
    from elastic_ray.session.adaptation import Adaptation


@dataclasses.dataclass(slots=True)
class SharedValues:
    """Combined effects that the policies have on a run (rate factor, batch, requested workers), equal on all ranks."""

    rate_factor: float = 1.0  # product of all ``ScaleRate`` requests
    batch_size: int | None = None  # global batch that a policy has set [samples]; None where the job chooses
    # fewest and most workers that a policy asks for; None for no wish
    wish: tuple[int | None, int | None] | None = None
    wished_by: int = -1  # number of the policy whose wish it is
    # epoch and number of the loader pass in which a policy has ended the training; None while it continues
    stopped: tuple[int, int] | None = None
    elapsed_s: float = 0.0  # since the run's first step [s]
    worker_s: float = 0.0  # the same, summed over the workers
    samples: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # watched ones, as reported last
    reports: int = 0  # how many reports they stand for
    trains: bool = False  # whether ``before_train`` has been called
    epoch: int = -1  # the last one for which ``before_epoch`` was called; -1 before
    ended_epoch: int = -1  # the same for ``after_epoch``
    off: dict[int, str] = dataclasses.field(default_factory=dict)  # why a policy is not asked any more, by its number
    # what was reported of the last step that was committed: text and detail of each event
    news: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    events: int = 0  # how many events there were

    def advance(self, passed_s: float, workers: int, samples: int) -> None:
        """Add a committed step's time, worker-seconds and ``samples`` to the totals of the run."""
        self.elapsed_s += passed_s
        self.worker_s += passed_s * workers
        self.samples += samples

    def start_train(self, batch_size: int | None) -> None:
        """Record that the run has started with the global batch ``batch_size``; None if the job chooses the batch."""
        self.trains, self.batch_size = True, batch_size

    def start_epoch(self, epoch: int) -> bool:
        """Record the next step's epoch; return True on the run's first call for this epoch or a later one."""
        before, self.epoch = self.epoch, max(self.epoch, epoch)
        return before < epoch

    def end_epoch(self, epoch: int) -> bool:
        """Record that an epoch has ended; return True on the run's first call for this epoch or a later one."""
        before, self.ended_epoch = self.ended_epoch, max(self.ended_epoch, epoch)
        return before < epoch

    def scale_rate(self, factor: float) -> None:
        """Multiply the run's learning-rate factor (the product of all policies' requests) by ``factor``."""
        self.rate_factor *= factor

    def hold_batch(self, batch_size: int | None) -> None:
        """Hold the global batch at ``batch_size`` [samples], as set by a policy; None lets the job choose again."""
        self.batch_size = batch_size

    def wish_for(self, bounds: tuple[int | None, int | None]) -> None:
        """Store a policy's request for (fewest, most) workers; None for a bound means the job's own limit."""
        self.wish, self.wished_by = None if bounds == (None, None) else bounds, -1

    def asked_by(self, policy: int) -> None:
        """Record that the most recently applied worker request, if any, came from the policy with this number."""
        if self.wish is not None and self.wished_by < 0:
            self.wished_by = policy
        if policy in self.off and self.wished_by == policy:
            self.wish_for((None, None))

    def add_news(self, text: str, detail: Mapping[str, Any]) -> dict[str, Any]:
        """Add an event and return its detail, extended by a number that lets the job recognise duplicates."""
        self.events += 1
        numbered = {**detail, "number": self.events}
        self.news.append((text, numbered))
        return numbered

    def switch_off(self, policy: int, why: str) -> None:
        """Record ``why`` a policy is no longer called, and cancel its request for workers."""
        self.off[policy] = why
        if self.wished_by == policy:
            self.wish_for((None, None))

    def to_state(self) -> dict[str, Any]:
        """Return the policies' effects as plain values, for :meth:`from_state`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SharedValues:
        """Return the policies' effects, restored from the plain values that :meth:`to_state` returned."""
        values = cls(**state)
        for name in ("wish", "stopped"):
            pair = getattr(values, name)
            setattr(values, name, None if pair is None else tuple(pair))
        return values


logger = logging.getLogger(__name__)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_COMING = 16  # batches that are told
_MOST_REQUESTS = 1000  # of one answer: a generator may never end
_DIGITS = 8
# Four bits each: a sum of squares is exact in float32 for up to 70 000 ranks.
_BITS = 4
_SIZE = 1 + 2 * _DIGITS


class PolicyRunner:
    """Caller of one run's policies on one rank, with their state for joiners, checkpoints and lost steps."""

    def __init__(
        self,
        applies: Adaptation,
        tell: Callable[[str, str, Mapping[str, Any]], None],
        tell_here: Callable[[str, str, Mapping[str, Any]], None],
    ) -> None:
        self._applies, self._tell, self._tell_here = applies, tell, tell_here
        self._policies: list[Policy] = []
        self._initial: list[dict[str, Any]] = []
        self._states: list[dict[str, Any]] = []  # what hooks have changed, as it was when the last one returned
        self._pending: list[Pending] = []
        self._told: set[str] = set()
        self._caller = HookCaller()
        self.values = SharedValues()  # what policies have brought about
        self.watched = WatchedMetrics()  # metrics that they watch, for the control sums
        self.ballot = PolicyBallot(self._said)  # what this rank's policies say, for the control sums

    def __bool__(self) -> bool:
        """True if there are any policies."""
        return bool(self._policies)

    def add(self, policies: Iterable[Policy]) -> None:
        """Add policies, to be called after the existing ones.

        A policy that has already been added is not added again, and neither is a copy (same class and equal attributes)
        given elsewhere, for example in the loop after the trainer. Equal policies in the same call are all added.
        """
        before = list(self._policies)
        for policy in policies:
            if any(policy is known for known in self._policies):
                continue
            copy_at = next((at for at, known in enumerate(before) if _is_same(policy, known)), None)
            if copy_at is not None:
                del before[copy_at]
                continue
            self._policies.append(policy)
            self._initial.append(_state_of(policy))
            self._states.append({})
            self._pending.append(Pending())
            self.watched.watch(policy.watches)
        self.ballot.have(len(self._policies))

    def wants(self, hook: str) -> bool:
        """True if an active policy overrides this hook."""
        return any(overrides(policy, hook) for number, policy in enumerate(self._policies) if self._is_asked(number))

    @property
    def starts_at_initial(self) -> bool:
        """True if a policy requires the run to start with the loader's batch."""
        return any(policy.starts_at_initial for policy in self._policies)

    def call(self, hook: str, view: PolicyView) -> None:
        """Call the hook of this name on every active policy that overrides it, in policy order."""
        for number, policy in enumerate(self._policies):
            if self._is_asked(number) and overrides(policy, hook):
                self._ask(number, policy, hook, view)

    def coming_batches(self, view: PolicyView) -> tuple[tuple[float, int], ...]:
        """Return the future batches known to the policies: (samples of the run, batch size), ordered by samples."""
        found: dict[float, int] = {}
        for policy in self._policies:
            try:
                told = [(float(ahead), int(size)) for ahead, size in policy.coming_batches(view)]
                if not all(math.isfinite(ahead) and size >= 1 for ahead, size in told):
                    raise ValueError(f"coming_batches must return (samples from now, batch) pairs, but got {told}")
                found |= {view.samples + ahead: size for ahead, size in told}
            except Exception:  # it is for the allocator alone
                logger.warning("policy %s failed in coming_batches", name_of(policy), exc_info=True)
        return tuple(sorted(found.items())[:_MOST_COMING])

    def _is_asked(self, number: int) -> bool:
        return number not in self.values.off and not self._pending[number].is_off

    def _ask(self, number: int, policy: Policy, hook: str, view: PolicyView) -> None:
        """Call one hook, and record its requests and state, or its failure; a failed hook changes no state."""
        pending = self._pending[number]

        def ask() -> tuple[list[Request], dict[str, Any]]:
            answer = _requests(getattr(policy, hook)(view))
            return answer, self._changed(number, policy)

        try:
            answer, state = self._caller.call(ask, policy.deadline_s)
        except HookTimeoutError as error:
            pending.fail(f"{hook}: {error}", ends=True)  # its thread may still be changing it
        except Exception as error:
            pending.fail(f"{hook}: {_described(error)}")
            logger.warning("policy %s failed in %s", name_of(policy), hook, exc_info=True)
            self._undo(number, pending, policy)
        else:
            self._states[number] = state
            pending.ask(hook, [to_plain(request) for request in answer])

    def _undo(self, number: int, pending: Pending, policy: Policy) -> None:
        """Undo the changes of a failed hook; a policy that cannot load its state is not called again."""
        try:
            self._load(number, policy)
        except Exception as error:
            pending.fail(f"load_state_dict: {_described(error)}", ends=True)

    def _said(self) -> Sequence[Any]:
        """Return each policy's requests and failures, and its state; None for a policy that has none."""
        said: list[Any] = []
        for number, pending in enumerate(self._pending):
            if not pending or number in self.values.off:
                said.append(None)
            elif pending.is_off:
                said.append(["took too long"])
            else:
                said.append([pending.requests, pending.failures, self._states[number]])
        return said

    def complete(self, step: int) -> None:
        """Apply the requests that all ranks agreed on during step ``step``, which has been committed."""
        if self.ballot.pop_entered():
            self._repeat()
        self.values.news = []  # they have arrived once another step is committed
        verdicts = self.ballot.take()
        for number, verdict in enumerate(verdicts):
            pending, policy = self._pending[number], self._policies[number]
            if verdict is Verdict.NOTHING:
                continue
            self._pending[number] = Pending(is_off=pending.is_off)
            if verdict is Verdict.DIFFERENT:
                self._differs(number, policy, pending, step)
                continue
            for failure in pending.failures:
                self._failed(number, policy, failure, step, ends=pending.is_off)
            for hook, plain in zip(pending.hooks, pending.requests, strict=True):
                self._apply(policy, hook, from_plain(plain), step)
            self.values.asked_by(number)

    def _apply(self, policy: Policy, hook: str, request: Request, step: int) -> None:
        """Apply a request made by all ranks and report the result; a refusal raises PolicyError if strict."""
        name = name_of(policy)
        if isinstance(request, SetBatch) and any(each.owns_batch for each in self._policies if each is not policy):
            return
        refused = self._applies.apply(request, self.values)
        detail = {"policy": name, "hook": hook, "request": to_plain(request), "step": step, "refused": refused}
        if not refused:
            self._announce(f"{name}.{hook} after step {step}: {request}", detail)
        elif policy.strict:
            raise PolicyError(f"policy {name} asked in {hook} for {request}, which is refused: {refused}")
        elif self._is_news(f"{name} {hook} {request} {refused}"):
            self._announce(f"{name}.{hook} asked for {request}, which is refused: {refused}", detail)

    def _failed(self, number: int, policy: Policy, failure: str, step: int, *, ends: bool) -> None:
        """Handle a failure that occurred in all ranks' copies of a policy."""
        name = name_of(policy)
        if policy.strict:
            raise PolicyError(f"policy {name} failed in {failure}")
        if ends:
            self._switch_off(number, failure)
        if ends or self._is_news(f"{name} {failure}"):
            after = "; it is not asked any more" if ends else ""
            self._announce(f"{name}.{failure}{after}", {"policy": name, "step": step, "failure": failure})

    def _differs(self, number: int, policy: Policy, pending: Pending, step: int) -> None:
        """Report that the ranks' copies of a policy make different requests."""
        name = name_of(policy)
        own = "; ".join(pending.failures) or ", ".join(str(from_plain(each)) for each in pending.requests) or "nothing"
        what = (
            f"policy {name} does not say the same on all ranks in step {step}: here {own}. A policy must decide by its "
            "view and its own attributes alone, neither by chance, nor by a clock or a rank"
        )
        if policy.strict:
            raise PolicyError(what)
        self._switch_off(number, "it does not say the same on all ranks")
        self._announce(f"{what}; it is not asked any more", {"policy": name, "step": step, "failure": "differs"})
        if pending.failures:  # which rank 0 need not know of
            self._tell_here("policy", f"policy {name} failed on a rank: {own}", {"policy": name, "failure": own})

    def _announce(self, text: str, detail: Mapping[str, Any]) -> None:
        """Report an event to the job's user from rank 0."""
        self._tell("policy", text, self.values.add_news(text, detail))

    def _repeat(self) -> None:
        """Report the latest events again, because the previous group's rank 0 may have died before reporting them."""
        for text, detail in self.values.news:
            self._tell("policy", text, detail)

    def _switch_off(self, number: int, why: str) -> None:
        """Switch off a policy and discard its state, which may differ between ranks."""
        self.values.switch_off(number, why)
        self._states[number], self._pending[number] = {}, Pending()

    def _is_news(self, text: str) -> bool:
        known = text in self._told
        self._told.add(text)
        return not known

    def check_plain(self) -> None:
        """Check that the policies' states consist of plain values, which can be sent to other ranks."""
        for policy in self._policies:
            for name, value in policy.state_dict().items():
                _check_plain(value, f"{name_of(policy)}.{name}")

    def end(self, steps: int) -> None:
        """End the run after `steps` steps, applying pending ``Report`` requests without agreement between ranks."""
        if self.ballot.pop_entered():
            self._repeat()
        for policy, pending in zip(self._policies, self._pending, strict=True):
            for hook, plain in zip(pending.hooks, pending.requests, strict=True):
                request = from_plain(plain)
                if isinstance(request, Report):
                    self._apply(policy, hook, request, steps)
        self._caller.close()

    def capture(self) -> dict[str, Any]:
        """Return the policies' states, pending requests and effects on the run as plain values, for :meth:`restore`."""
        return {
            "values": self.values.to_state(),
            "states": copy.deepcopy(self._states),
            "names": [name_of(policy) for policy in self._policies],
            "pending": [dataclasses.asdict(pending) for pending in self._pending],
        }

    def answers(self) -> list[Any]:
        """Return the policies' pending requests and states as plain values, for :meth:`adopt` on another worker."""
        return [[dataclasses.asdict(pending) for pending in self._pending], self._states]

    def adopt(self, answers: Sequence[Any]) -> None:
        """Adopt the :meth:`answers` of the worker that calls the policies on behalf of this worker's unit."""
        pending, self._states = answers
        self._pending = [Pending(**each) for each in pending]

    @property
    def facts(self) -> list[Any]:
        """Description of the policies as plain values, which ranks compare."""
        return [[name_of(policy), initial] for policy, initial in zip(self._policies, self._initial, strict=True)]

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`capture`; states and requests are ignored if the policies differ."""
        self.values = SharedValues.from_state(tree["values"])
        same = list(tree["names"]) == [name_of(policy) for policy in self._policies]
        if not same:
            self.values.off = {}
            self.values.wish_for((None, None))
        self._pending = [Pending() for _ in self._policies]
        for number, policy in enumerate(self._policies):
            self._states[number] = copy.deepcopy(dict(tree["states"][number])) if same else {}
            if same:
                self._pending[number] = Pending(**copy.deepcopy(tree["pending"][number]))
            self._load(number, policy)
        self.watched.restore(self.values.metrics, self.values.reports)

    def _changed(self, number: int, policy: Policy) -> dict[str, Any]:
        """Return a copy of the parts of a policy's state that have changed since the start; the rest are settings."""
        initial = self._initial[number]
        given = dict(policy.state_dict())
        for name, value in given.items():
            _check_plain(value, f"{name_of(policy)}.{name}")
        state = copy.deepcopy(given)
        return {name: value for name, value in state.items() if name not in initial or initial[name] != value}

    def _load(self, number: int, policy: Policy) -> None:
        """Load an active policy's state into it."""
        if self._is_asked(number):
            policy.load_state_dict(copy.deepcopy({**self._initial[number], **self._states[number]}))


def _is_same(policy: Policy, other: Policy) -> bool:
    """True if two policies, such as the trainer's and the loop's copies of one, have the same class and attributes."""
    try:
        return type(policy) is type(other) and bool(vars(policy) == vars(other))
    except Exception:  # attributes that do not compare, such as arrays
        return False


def _requests(answer: Any) -> list[Request]:
    """Return a hook's answer as a list. Raises TypeError if the answer is not one request, several, or None."""
    if answer is None:
        return []
    several = not is_request(answer) and isinstance(answer, Iterable)
    listed = list(itertools.islice(answer, _MOST_REQUESTS + 1)) if several else [answer]
    if len(listed) > _MOST_REQUESTS:
        raise ValueError(f"a hook returns {_MOST_REQUESTS} requests at most, but returned more")
    for each in listed:
        if not is_request(each):
            raise TypeError(
                f"a hook returns a request of elastic_ray.adaptation, several, or None, but returned {each!r}"
            )
    return listed


def _described(error: Exception) -> str:
    """Return an error as text that is the same on all ranks, without object addresses."""
    return _ADDRESS.sub("", f"{type(error).__name__}: {error}")


def _state_of(policy: Policy) -> dict[str, Any]:
    return copy.deepcopy(dict(policy.state_dict()))


def _check_plain(value: Any, where: str) -> None:
    """Raise PolicyError unless the value consists of plain values only."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                raise PolicyError(f"the state of a policy is plain values, but {where} has the key {key!r}")
            _check_plain(item, f"{where}[{key!r}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise PolicyError(
            f"the state of a policy is numbers, strings, None, and lists, tuples and dicts of these, but {where} is "
            f"{value!r} of type {type(value).__name__}: keep a plain value, or override state_dict and load_state_dict"
        )


@dataclasses.dataclass(slots=True)
class Pending:
    """One policy's requests and failures that ranks have not agreed on yet; its truth value is False if empty."""

    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # as plain values
    hooks: list[str] = dataclasses.field(default_factory=list)  # which hook asked for each
    failures: list[str] = dataclasses.field(default_factory=list)  # hooks that failed, and how
    is_off: bool = False  # the policy is not asked any more on this rank

    def __bool__(self) -> bool:
        return bool(self.requests or self.failures)

    def ask(self, hook: str, requests: Sequence[dict[str, Any]]) -> None:
        """Record a hook's requests."""
        self.requests += requests
        self.hooks += [hook] * len(requests)

    def fail(self, failure: str, *, ends: bool = False) -> None:
        """Record a hook's failure; with ``ends``, the policy is no longer called on this rank."""
        self.failures.append(failure)
        self.is_off = self.is_off or ends


class Verdict(enum.Enum):
    """Result of comparing one policy's requests across all ranks: none, agreed or different."""

    NOTHING = enum.auto()
    AGREED = enum.auto()
    DIFFERENT = enum.auto()


class PolicyBallot:
    """Values that ranks use to compare their policies' requests: for each policy, a flag and a digest.

    The values are part of the control sums, which all ranks add up in every step. Each digit d of a digest is sent with
    its square: all W ranks have the same digit exactly when W sum(d^2) = sum(d)^2 (Cauchy-Schwarz). All ranks that
    commit a step therefore know the result, and no extra collective is needed.
    """

    resting: None = None

    def __init__(self, said: Callable[[], Sequence[Any]]) -> None:
        self._said = said
        self._policies = 0
        self._verdicts: tuple[Verdict, ...] = ()
        self._entered = False

    def have(self, policies: int) -> None:
        """Set the number of policies to compare, which must be the same on all ranks."""
        self._policies = policies

    def start(self) -> None:
        """Start comparing in a new group of ranks, and discard the results of the previous group."""
        self._verdicts, self._entered = (), True

    def pop_entered(self) -> bool:
        """Return True if a new group has been entered since the last call."""
        entered, self._entered = self._entered, False
        return entered

    def size(self, world_size: int) -> int:
        """Return the number of values that the ballot adds to the control sums (numbers all-reduced in each step)."""
        return _SIZE * self._policies

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return this rank's flags and digests for all policies, concatenated, to be summed over all ranks."""
        return [value for said in self._said() for value in flag_and_digest(said)] if self._policies else ()

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Determine, for each policy, whether the ranks' requests agree, from :meth:`values` summed over all ranks."""
        self._verdicts = tuple(verdict(sums[first : first + _SIZE], world_size) for first in range(0, len(sums), _SIZE))

    def take(self) -> tuple[Verdict, ...]:
        """Return each policy's latest verdict (none, agreed or different), in order, and clear the verdicts."""
        verdicts, self._verdicts = self._verdicts, ()
        return verdicts


def flag_and_digest(said: Any) -> list[float]:
    """Return 1, and each digit of a digest of ``said`` with its square; all zeros if ``said`` is None."""
    if said is None:
        return [0.0] * _SIZE
    number = int.from_bytes(
        hashlib.blake2b(_canonical(said).encode(), digest_size=_DIGITS * _BITS // 8).digest(), "big"
    )
    digits = [(number >> (_BITS * index)) % (1 << _BITS) for index in range(_DIGITS)]
    return [1.0, *(float(value) for digit in digits for value in (digit, digit * digit))]


def _canonical(value: Any) -> str:
    """Return a text that is the same for equal values, regardless of the order of dict keys; tuples count as lists."""
    if isinstance(value, Mapping):
        items = sorted(f"{key!r}: {_canonical(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_canonical, value))}]"
    return repr(value)


def verdict(sums: Sequence[float], world_size: int) -> Verdict:
    """Return the verdict on one policy's requests, from :func:`flag_and_digest` summed over all ranks."""
    saying = round(sums[0])
    if saying == 0:
        return Verdict.NOTHING
    pairs = zip(sums[1::2], sums[2::2], strict=True)
    same = saying == world_size and all(world_size * round(squares) == round(total) ** 2 for total, squares in pairs)
    return Verdict.AGREED if same else Verdict.DIFFERENT
