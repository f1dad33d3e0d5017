"""Ranks for the tests of strategies: a few processes that all tests of a run share."""

from tests.loop.conftest import ranks

__all__ = ["ranks"]
