"""What one policy has said on this rank and the ranks have not agreed on yet (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(slots=True)
class Pending:
    """See the module's text; false while there is nothing.

    Attributes:
        requests: as plain values.
        hooks: which hook asked for each.
        failures: hooks that failed, and how.
        is_off: the policy is not asked any more on this rank.
    """

    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    hooks: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    is_off: bool = False

    def __bool__(self) -> bool:
        return bool(self.requests or self.failures)

    def ask(self, hook: str, requests: Sequence[dict[str, Any]]) -> None:
        """A hook has answered."""
        self.requests += requests
        self.hooks += [hook] * len(requests)

    def fail(self, failure: str, *, ends: bool = False) -> None:
        """A hook has failed; with ``ends`` the policy is not asked any more here."""
        self.failures.append(failure)
        self.is_off = self.is_off or ends
