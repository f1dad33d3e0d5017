"""The public names: there, documented, and free of Ray and torch until they are used."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import elastic_ray


@pytest.mark.parametrize("name", elastic_ray.__all__)
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(elastic_ray, name)
    assert inspect.getdoc(value), f"elastic_ray.{name} has no docstring"
    assert value.__module__.startswith("elastic_ray.")


@pytest.mark.parametrize("name", elastic_ray.__all__)
def test_what_a_public_class_offers_is_documented(name: str) -> None:
    value = getattr(elastic_ray, name)
    if not inspect.isclass(value):
        return
    own = {n: m for n, m in vars(value).items() if not n.startswith("_") and isinstance(m, property | classmethod)}
    methods = {n: m for n, m in vars(value).items() if not n.startswith("_") and inspect.isfunction(m)}
    assert [n for n, member in {**own, **methods}.items() if not inspect.getdoc(member)] == []


def test_the_list_is_sorted_without_repeats_and_what_dir_shows() -> None:
    assert elastic_ray.__all__ == sorted(set(elastic_ray.__all__))
    assert dir(elastic_ray) == elastic_ray.__all__


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'ElasticTrainr'; it has .*ElasticTrainer"):
        elastic_ray.ElasticTrainr  # noqa: B018


def test_importing_the_packages_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, elastic_ray, placement\n"
        "from elastic_ray import ElasticConfig, JobEvent, report\n"
        "sys.exit(' '.join(m for m in ('ray', 'torch') if m in sys.modules) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
