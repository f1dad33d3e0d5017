"""The public names: there, documented, and free of Ray and torch until they are used."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import elastic_ray
import elastic_ray.sync
import placement

NAMES = [(package, name) for package in (elastic_ray, elastic_ray.errors, placement) for name in package.__all__]


@pytest.mark.parametrize(("package", "name"), NAMES, ids=lambda each: getattr(each, "__name__", each))
def test_a_public_name_resolves_and_is_documented(package: ModuleType, name: str) -> None:
    value = getattr(package, name)
    assert inspect.getdoc(value), f"{package.__name__}.{name} has no docstring"
    assert value.__module__.startswith(("elastic_ray.", "placement."))


@pytest.mark.parametrize(("package", "name"), NAMES, ids=lambda each: getattr(each, "__name__", each))
def test_what_a_public_class_offers_is_documented(package: ModuleType, name: str) -> None:
    value = getattr(package, name)
    if not inspect.isclass(value):
        return
    own = {n: m for n, m in vars(value).items() if not n.startswith("_") and isinstance(m, property | classmethod)}
    methods = {n: m for n, m in vars(value).items() if not n.startswith("_") and inspect.isfunction(m)}
    assert [n for n, member in {**own, **methods}.items() if not inspect.getdoc(member)] == []


@pytest.mark.parametrize("package", [elastic_ray, placement])
def test_list_is_sorted_without_repeats_and_what_dir_shows(package: ModuleType) -> None:
    assert package.__all__ == sorted(set(package.__all__))
    assert dir(package) == package.__all__


def test_public_modules_are_attributes_and_moved_names_are_gone() -> None:
    code = (
        "import elastic_ray as er\n"
        "assert er.events.JobPhase and er.faults.Faults and er.sync.ZeRO1 and er.adaptation.Stop\n"
        "assert all(getattr(er.errors, name) for name in er.errors.__all__)\n"
        "assert not any(hasattr(er, name) for name in (*er.errors.__all__, 'JobEvent', 'Faults', 'ArrowDataset'))\n"
        "assert not hasattr(er.errors, 'JobEvent') and not hasattr(er.sync, 'Rule')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def test_the_top_is_small() -> None:
    assert len(elastic_ray.__all__) <= 26 and len(elastic_ray.sync.__all__) <= 20


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Clustr'; it has .*Cluster"):
        placement.Clustr  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'ElasticTrainr'; it has .*ElasticTrainer"):
        elastic_ray.ElasticTrainr  # noqa: B018


def test_importing_the_packages_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, elastic_ray, placement\n"
        "from elastic_ray import ElasticConfig, report\n"
        "from elastic_ray.events import JobEvent\n"
        "from placement import Autoscaling, Cluster, JobView, NodeType, Policy, Tenant\n"
        "sys.exit(' '.join(m for m in ('ray', 'torch') if m in sys.modules) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def test_the_version_is_the_changelogs_newest_and_stands_once() -> None:
    root = Path(__file__).parents[1]
    newest = re.search(r"^## \[(\d[\w.]*)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and elastic_ray.__version__ == newest[1]
    assert f"\nversion: {newest[1]}\n" in (root / "CITATION.cff").read_text()
    assert 'dynamic = ["version"]' in (root / "pyproject.toml").read_text()
    shown = subprocess.run(
        [sys.executable, "-m", "elastic_ray.cli", "--version"], check=True, capture_output=True, text=True, timeout=180
    )
    assert shown.stdout.rstrip().endswith(elastic_ray.__version__)


@pytest.mark.parametrize(
    ("hidden", "line"),
    [
        ("placement.py", "import elastic_ray"),
        ("placement/__init__.py", "from elastic_ray import ElasticTrainer"),
        ("tuning.py", "from tuning import elastic"),
    ],
)
def test_a_file_that_hides_our_package_is_named(hidden: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / hidden
    file.parent.mkdir(exist_ok=True)
    file.touch()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    answer = subprocess.run(
        [sys.executable, "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    last = answer.stderr.rstrip().splitlines()[-1]
    assert answer.returncode == 1 and last.startswith("ImportError: ") and str(file) in last
