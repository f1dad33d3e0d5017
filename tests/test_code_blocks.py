"""Python blocks of the README and of docs/ run, page by page, in the order in which people read them.

A page's blocks share their names, as in one script. A block that cannot run here says why in a comment above it,
``<!-- not run: reason -->``; a block that needs a package that may be missing says ``<!-- needs: package -->``. Recipes
have a test of their own, which runs them on two ranks as well, and so has the tutorial, with its commands.
"""

from __future__ import annotations

import contextvars
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.local_cluster import LocalCluster

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- (not run|needs): ([^\n]+) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {
    page.name: BLOCK.findall(page.read_text())
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if page.name not in ("recipes.md", "tutorial.md")
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One cluster for all pages, with warm processes, so that each job starts in one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTIC_RAY_POOL", "per_node=3,memory_share=0.5")
        made = LocalCluster(num_cpus=3)
        yield made
        made.shutdown()


@pytest.mark.matrix(every=1)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
def test_the_blocks_of_a_page_run(
    page: str, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)  # pages name files of the repository
    monkeypatch.setenv("HOME", str(tmp_path))  # where results go unless a page says so
    monkeypatch.setenv("ELASTIC_RAY_TRACKER_DIR", str(tmp_path / "tracked"))
    script = contextvars.Context()  # a page is a process of its own to elastic_ray: its epochs begin at 0
    names: dict[str, Any] = {"__name__": "__main__" if page == "README.md" else "page"}
    for mark, told, code in PAGES[page]:
        if mark == "not run" or (mark == "needs" and importlib.util.find_spec(told) is None):
            continue
        line = (ROOT / ("" if page == "README.md" else "docs") / page).read_text().partition(code)[0].count("\n")
        script.run(exec, compile("\n" * line + code, page, "exec"), names)


def test_few_blocks_are_not_run() -> None:
    marked = [told for blocks in PAGES.values() for mark, told, _ in blocks if mark == "not run"]
    assert len(marked) <= 2
    assert all(len(reason.split()) >= 3 for reason in marked)


def test_code_is_marked_as_python() -> None:
    """``py`` and the like would be shown in colours, and run by nobody."""
    for page in PAGES:
        text = (ROOT / ("" if page == "README.md" else "docs") / page).read_text()
        languages = set(re.findall(r"^ *```(\w+)$", text, re.MULTILINE))
        assert languages <= {"python", "sh", "bash", "console", "text", "diff", "yaml"}, page
