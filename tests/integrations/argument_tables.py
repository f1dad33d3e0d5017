"""Reads the tables of the docs that say what becomes of a framework's arguments."""

from __future__ import annotations

import re
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"


def arguments(page: str, owner: str) -> dict[str, str]:
    """``kept``, ``mapped`` or ``refused`` by argument, as the page's section about ``owner`` says."""
    sections = (_DOCS / page).read_text().split(f"\n### Arguments of `{owner}`\n")
    assert len(sections) == 2, f"docs/{page} must have one section 'Arguments of `{owner}`'"
    section = sections[1].partition("\n#")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| (kept|mapped|refused) \|", section, re.MULTILINE))
