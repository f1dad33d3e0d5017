"""Registry of the built-in allocation policies by name, and loading of custom policies."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.policies.baselines.boa import BoaPolicy
from placement.policies.baselines.fair_share import FairSharePolicy
from placement.policies.baselines.fifo import FifoPolicy
from placement.policies.baselines.fixed import FixedPolicy
from placement.policies.baselines.optimus import OptimusPolicy
from placement.policies.baselines.pollux import PolluxPolicy
from placement.policies.baselines.sia import SiaPolicy
from placement.policies.baselines.throughput_efficiency import ThroughputEfficiencyPolicy
from placement.policies.baselines.tiresias import TiresiasPolicy
from placement.policies.baselines.utility_cost import UtilityCostPolicy
from placement.policies.goodput.policy import GoodputPolicy
from placement.policies.shared.base import Policy, Target, as_targets

SHAPE = "a function (jobs, cluster, now_s) -> {job: workers or Target}, or a class with such a method decide"


@dataclasses.dataclass(frozen=True, slots=True)
class OwnPolicy:
    """Custom policy made from a function."""

    name: str  # see ``Policy``
    # answers with a number of workers, or a ``Target``, for every job
    function: Callable[[Sequence[JobView], Cluster, float], Mapping[str, Target | int]]
    rigid: bool = False  # see ``Policy``

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        return as_targets(self.name, self.function(jobs, cluster, now_s))


def own_policy(given: Any) -> Policy:
    """Return a policy made from user code, which may be a policy object or class, or a function."""
    policy = _instance(given) if isinstance(given, type) else given
    decide = getattr(policy, "decide", None)
    if callable(decide):
        _check_arguments(decide, given)
        if isinstance(policy, Policy):
            return policy
        return OwnPolicy(type(policy).__name__, decide, rigid=bool(getattr(policy, "rigid", False)))
    if callable(policy) and not isinstance(given, type):
        _check_arguments(policy, given)
        return OwnPolicy(getattr(policy, "__name__", type(policy).__name__), policy)
    raise TypeError(f"policy must be a registered name, {SHAPE}, but got {given!r}")


def load(text: str) -> Any:
    """Load the object that ``module:name`` or ``path/to/file.py:name`` refers to.

    Raises ValueError if the module, file or name does not exist; the message says which.
    """
    place, _, name = text.rpartition(":")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise ValueError(f"policy {text!r} must be module:name or file.py:name, but {place!r}: {error}") from error
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        has = ", ".join(sorted(own)) or "no function or class of its own"
        raise ValueError(f"policy {text!r}: {place} has no {name!r}; it has {has}")
    return getattr(module, name)


def _module_of_file(path: Path) -> Any:
    """Load a Python file as a module, executed again at each call; raises FileNotFoundError if the file is missing."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    name = f"policy_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module is of no use to the next import
        raise
    return module


def _instance(kind: type[Any]) -> Any:
    if not callable(getattr(kind, "decide", None)):
        raise TypeError(f"policy must be a registered name, {SHAPE}, but got the class {kind.__name__} without decide")
    try:
        return kind()
    except TypeError as error:
        raise TypeError(f"policy class {kind.__name__} wants arguments; pass an object of it: {error}") from error


def _check_arguments(function: Any, given: Any) -> None:
    """Raise TypeError unless the function accepts (jobs, cluster, now_s); functions without a signature pass."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: no signature to read
        return
    try:
        signature.bind([], Cluster(), 0.0)
    except TypeError as error:
        raise TypeError(f"policy must be {SHAPE}, but {given!r} takes {signature}: {error}") from None


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "boa": BoaPolicy,
        "fair_share": FairSharePolicy,
        "fifo": FifoPolicy,
        "fixed": FixedPolicy,
        "goodput": GoodputPolicy,
        "optimus": OptimusPolicy,
        "pollux": PolluxPolicy,
        "sia": SiaPolicy,
        "throughput_efficiency": ThroughputEfficiencyPolicy,
        "tiresias": TiresiasPolicy,
        "utility_cost": UtilityCostPolicy,
    }
)
"""Registered policies; the contract tests run over all of them."""


def make_policy(policy: object) -> Policy:
    """Return a policy object, given a name, a policy or a function.

    Args:
        policy: A registered name; ``module:name`` or ``path/to/file.py:name`` of a custom policy; a policy object
            or class; or a plain function ``(jobs, cluster, now_s) -> {job: workers or Target}``.

    Raises:
        ValueError: No policy has that name.
        TypeError: The object cannot be used as a policy.
    """
    if not isinstance(policy, str):
        return own_policy(policy)
    if policy in POLICIES:
        return POLICIES[policy]()
    if ":" in policy:
        try:
            return own_policy(load(policy))
        except TypeError as error:  # the name is right, what it names is not
            raise ValueError(f"policy {policy!r}: {error}") from error
    raise ValueError(
        f"policy must be one of {', '.join(sorted(POLICIES))}, or a policy of your own as module:name or "
        f"path/to/file.py:name, but got {policy!r}"
    )
