"""SHELL: policies pickled for transport to the allocator's process."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import pickle
import sys
from typing import Any

import ray.cloudpickle

from placement.policies import Policy, make_policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedPolicy:
    """Policy in a form that any process in the cluster can unpack."""

    name: str
    identity: str  # equal for the same code with the same settings, in whichever process it was packed
    pickled: bytes  # the policy; modules of the user's own travel along

    def open(self) -> Policy:
        """Unpack and return the policy."""
        policy: Policy = pickle.loads(self.pickled)
        return policy


def pack_policy(policy: object) -> PackedPolicy:
    """Return a policy, given in any form that ``make_policy`` accepts, pickled for the allocator's process."""
    if isinstance(policy, PackedPolicy):
        return policy
    made = make_policy(policy)
    source = _source(made)
    module = sys.modules.get(getattr(source, "__module__", None) or "")
    own = module is not None and module.__name__.partition(".")[0] not in ("placement", "__main__")
    try:
        if own:  # the allocator's process may not find it
            ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
        pickled = bytes(ray.cloudpickle.dumps(made))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise TypeError(
            f"policy {made.name!r} cannot be sent to the allocator ({error}); create what cannot be pickled inside it"
        ) from error
    finally:
        if own:
            ray.cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return PackedPolicy(name=made.name, identity=_identity(made, source), pickled=pickled)


def _source(policy: Policy) -> Any:
    """Return the user's function, or the policy's class."""
    function = getattr(policy, "function", None)
    if inspect.ismethod(function):
        return type(function.__self__)
    return function if callable(function) else type(policy)


def _identity(policy: Policy, source: Any) -> str:
    """Return the name, with a digest of code and settings. A pickle would differ between processes."""
    try:
        code = inspect.getsource(source)
    except (OSError, TypeError):  # typed into an interpreter, or written in C
        code = getattr(source, "__qualname__", "")
    settings = repr(policy) if " at 0x" not in repr(policy) else ""
    digest = hashlib.sha256(f"{code}\n{settings}".encode()).hexdigest()[:16]
    return f"{policy.name}/{digest}"
