"""Links in the documentation lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_every_relative_link_resolves(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_architecture_names_every_room() -> None:
    told = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {
        path.parent.relative_to(ROOT) for path in [*ROOT.glob("elastic_ray/*/*.py"), *ROOT.glob("placement/*/*.py")]
    }
    assert not [room for room in sorted(rooms) if room.name != "__pycache__" and f"`{room}`" not in told]
