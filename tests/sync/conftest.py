"""Ranks for the tests of synchronisation."""

from tests.loop.conftest import ranks

__all__ = ["ranks"]
