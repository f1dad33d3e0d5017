"""SHELL: private random numbers, separate from the global generators that other code uses."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler


class PrivateRandom:
    """Private random state: within the context, code that uses the global generators draws from this state instead.

    Covers torch's CPU generator, NumPy's and Python's global ones, and generators in `owner`'s attributes. The context
    may be entered again and continues from its last state. On exit, the generators' own state is restored.
    """

    def __init__(self, *, seed: int, epoch: int, owner: object = None) -> None:
        """Derive the initial state from `seed` and `epoch` alone."""
        self._words = np.random.SeedSequence([seed, epoch]).generate_state(4)
        self._owner = owner
        self._inside: list[Any] | None = None
        self._outside: list[tuple[Any, Any]] = []

    def __enter__(self) -> PrivateRandom:
        generators = _generators(self._owner)
        self._outside = [(generator, _get_state(generator)) for generator in generators]
        for number, generator in enumerate(generators):
            if self._inside is None:
                _seed(generator, [int(word) for word in self._words])
            else:
                _set_state(generator, self._inside[number])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = [_get_state(generator) for generator, _ in self._outside]
        for generator, state in self._outside:
            _set_state(generator, state)


def _generators(owner: object) -> list[Any]:
    """Return the global generators and those held by `owner` or by a sampler within `owner`, in a fixed order."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    # the modules have the methods of their hidden global instance
    found: list[Any] = [torch.default_generator, np.random, random]
    pending = [owner]
    while pending:
        for _, value in sorted(getattr(pending.pop(), "__dict__", {}).items()):
            if isinstance(value, kinds) and not any(value is other for other in found):
                found.append(value)
            elif isinstance(value, Sampler):
                pending.append(value)
    return found


def _seed(generator: Any, words: list[int]) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(words[0] | (words[1] & 0x7FFFFFFF) << 32)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(words).state
    else:
        generator.seed(words[0])


def _get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
