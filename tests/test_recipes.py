"""Every snippet of docs/recipes.md runs, alone and on two ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.ranks import Ranks

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
BEGINNING, *SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """See `Ranks`."""
    made = Ranks()
    yield made
    made.close()


def run(snippet: str) -> list[float]:
    """Sums of the parameters that the snippet leaves in its model."""
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(BEGINNING + snippet, "docs/recipes.md", "exec"), names)
    model = names.get("model")
    weights = [p.detach().double().sum().item() for p in model.parameters()] if model is not None else []
    del model
    names.clear()  # functions and their namespace hold each other, and worker processes wait until a loader is let go
    return weights


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
@pytest.mark.parametrize("world", [None, 2])
def test_a_recipe_runs(ranks: Ranks, world: int | None, number: int) -> None:
    results = ranks.run(run, SNIPPETS[number], world=world)
    if world is not None:
        assert results[0] == results[1]


def test_the_page_has_them_all() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert len(headings) == 14 and len(SNIPPETS) == 16, "averages and cross-validation have two"
