"""Directories of branches: removed where a branch wrote them, and nobody else's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.batch.branch_losses import BranchError
from elastic_ray.job.branching import Branch


def branch(folder: Path) -> Branch:
    trainer = er.ElasticTrainer(print, run_config=ray.train.RunConfig(name="net", storage_path=str(folder)))
    spec = dataclasses.replace(trainer.spec(), job="net-branch-32", storage_path=str(folder / "net-branch-32"))
    return Branch(size=32, spec=spec)


def test_what_a_branch_left_is_removed(tmp_path: Path) -> None:
    left = branch(tmp_path)
    left.remove()  # where there is none
    left.create()
    branch(tmp_path).remove()
    assert not list(tmp_path.glob("net-branch-*"))


@pytest.mark.parametrize("content", ["model.pt", ".elastic_ray_run"])
def test_a_users_directory_of_that_name_stays(tmp_path: Path, content: str) -> None:
    mine = tmp_path / "net-branch-32" / content
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(BranchError, match=r"net-branch-32 is needed for a branch, but holds .* move it away"):
        branch(tmp_path).remove()
    assert mine.read_text() == "mine"
