"""The documentation: links lead somewhere, and what must be named is named."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import yaml

import elastic_ray
import elastic_ray.adaptation
import elastic_ray.errors
import elastic_ray.sync
import placement
import placement.simulator
import tuning
import tuning.nni
from docs import measurements

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", [*PAGES, *sorted(DOCS.glob("lab/*.md"))], ids=lambda page: page.name)
def test_every_relative_link_resolves(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_section_is_there_twice(page: Path) -> None:
    """As a merge may leave it."""
    sections = re.findall(r"^## .*$", page.read_text(), re.MULTILINE)
    assert len(sections) == len(set(sections))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_row_of_a_table_is_there_twice(page: Path) -> None:
    rows = re.findall(r"^\| [^|\s].* \|$(?!\n\|-)", page.read_text(), re.MULTILINE)  # no heads
    assert sorted({row for row in rows if rows.count(row) > 1}) == []


def test_files_that_code_and_tests_cite_exist() -> None:
    """``docs/protocol.md, pitfall 1``: a comment that points at the documentation."""
    for folder in ("elastic_ray", "placement", "tuning", "tests", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            cited = re.findall(r"\bdocs/[\w-]+\.md\b", path.read_text())
            assert [each for each in cited if not (ROOT / each).exists()] == [], path


def test_pitfalls_that_code_cites_are_on_the_page() -> None:
    told = set(re.findall(r"^(\d+)\. ", (DOCS / "protocol.md").read_text().partition("## Pitfalls")[2], re.MULTILINE))
    sources = [path for folder in ("elastic_ray", "tests") for path in (ROOT / folder).rglob("*.py")]
    cited = {n for path in sources for n in re.findall(r"docs/protocol\.md, pitfall (\d+)", path.read_text())}
    assert cited and cited <= told


def test_the_architecture_names_every_room() -> None:
    told = (DOCS / "architecture.md").read_text()
    rooms = {
        path.parent.relative_to(ROOT) for path in [*ROOT.glob("elastic_ray/*/*.py"), *ROOT.glob("placement/*/*.py")]
    }
    assert not [room for room in sorted(rooms) if room.name != "__pycache__" and f"`{room}`" not in told]


@pytest.mark.parametrize(
    ("page", "package"),
    [
        ("api-elastic-ray.md", elastic_ray),
        ("api-elastic-ray.md", elastic_ray.errors),
        ("api-sync.md", elastic_ray.sync),
        ("api-adaptation.md", elastic_ray.adaptation),
        ("api-placement.md", placement),
        ("api-placement.md", placement.simulator),
        ("api-tuning.md", tuning),
        ("api-tuning.md", tuning.nni),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_the_reference_has_every_public_name(page: str, package: object) -> None:
    told = re.findall(r"^::: ([\w.]+)$", (DOCS / page).read_text(), re.MULTILINE)
    names = [n for n in told if n.rpartition(".")[0] == package.__name__]  # type: ignore[attr-defined]
    shared = {"placement.simulator.InputError"}  # stands among placement's own
    wanted = {f"{package.__name__}.{name}" for name in package.__all__} - shared  # type: ignore[attr-defined]
    assert sorted(names) == sorted(wanted)


@pytest.mark.parametrize(
    ("page", "config"),
    [
        ("api-elastic-ray.md", elastic_ray.ElasticConfig),
        ("api-elastic-ray.md", elastic_ray.SchedulingConfig),
        ("api-placement.md", placement.AllocatorConfig),
    ],
)
def test_each_field_of_a_config_is_in_one_group(page: str, config: type) -> None:
    (row,) = re.findall(rf"^\| `{config.__name__}` \| (.*) \|$", (DOCS / page).read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(field.name for field in dataclasses.fields(config))


def test_the_site_has_every_page() -> None:
    named = re.findall(r"([\w-]+\.md)", str(yaml.safe_load((ROOT / ".mkdocs.yml").read_text())["nav"]))
    assert sorted(named) == sorted(path.name for path in DOCS.glob("*.md"))


def test_ci_builds_the_site_strictly() -> None:
    assert "mkdocs build --strict -f .mkdocs.yml" in (ROOT / ".ci" / "run").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_readme_shows_what_the_measurements_say() -> None:
    """Each of its rows is the beginning of a claim there, and each of its figures that claim's."""
    table = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w[^|]*) \| [^|]* \| ([^|]*) \|$", table, re.MULTILINE)
    assert len(rows) == 3
    for claim, told in rows:
        measured = [row["value"] for row in measurements.read() if row["claim"].startswith(claim)]
        figures = re.findall(r"(\d[\d.]*) x", told)
        assert figures and [each for each in figures if float(each) not in measured] == [], claim
    assert "missed" not in (ROOT / "README.md").read_text() and "bar" not in table


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    """``tests/gpu`` and ``elastic_ray.sync`` in code, and ``name`` in ``[file](../file.py), name``."""
    text = page.read_text()
    named = re.findall(r"`((?:elastic_ray|placement|tuning|tests|examples|docs|deploy)[./][\w./-]*\w)/?`", text)
    assert [each for each in named if not exists(each)] == []
    behind = re.findall(r"\]\(\.\./([\w/]+\.py)(?:#L\d+)?\)(?:,| \() ?((?:`[\w.]+`(?:, | and )?)+)", text)
    inside = [(file, name) for file, names in behind for name in re.findall(r"`([\w.]+)`", names)]
    assert [each for each in inside if each[1].split(".")[-1] not in names_in(ROOT / each[0])] == []


def names_in(file: Path) -> set[str]:
    """Return the functions, classes, arguments and assigned names of a file."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    defined = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    assigned = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return defined | assigned | {each.arg for each in nodes if isinstance(each, ast.arg)}


def exists(named: str) -> bool:
    """True if it is a file or folder of the repository, a module, or a name in one."""
    if (ROOT / named).exists():
        return True
    if "/" in named:
        return False
    parts = named.split(".")
    for n in range(len(parts), 0, -1):
        if (path := ROOT.joinpath(*parts[:n])).is_dir() or path.with_suffix(".py").is_file():
            value = importlib.import_module(".".join(parts[:n]))
            return all((value := getattr(value, part, None)) is not None for part in parts[n:])
    return False


def test_a_word_of_the_glossary_has_one_meaning() -> None:
    words = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    each = [word for row in words for word in re.split(r", (?![^(]*\))", row) if word not in ("Word", "---")]
    rows = [row for row in words if row not in ("Word", "---")]
    assert 80 <= len(rows) <= 115 and sorted({word for word in each if each.count(word) > 1}) == []


def test_the_architecture_names_each_room_once() -> None:
    rooms = re.findall(r"^\| \[`([\w/]+)`\]", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    assert len(rooms) == len(set(rooms))


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("save model", "checkpoints.md"),
        ("drain node", "operations.md"),
        ("TRL", "huggingface.md"),
        ("quota", "operations.md"),
        ("resize", "operations.md"),
    ],
)
def test_what_people_search_for_is_heading_of_the_guide(words: str, page: str) -> None:
    """The site's search weighs headings ten times as much as text."""
    headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(), re.MULTILINE)
    assert any(all(word.lower() in heading.lower() for word in words.split()) for heading in headings)
