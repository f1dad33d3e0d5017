"""``docs/a-step.md``: its links lead to the lines that it names, and a step comes by in its order.

With ``UPDATE=1`` in the environment the lines of its links are written anew.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import elastic_ray as er
from elastic_ray.loop.api import current_session
from tests.loop.changing import Kill, run_job

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "a-step.md"
PACKAGE = ROOT / "elastic_ray"
LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\(\.\./(?P<file>[\w/.]+)#L(?P<line>\d+)\)")
KILLED_IN = 22


def line_of(file: str, name: str) -> int:
    """The line on which a method is defined, from 1."""
    owner, _, method = name.rpartition(".")
    lines = (ROOT / file).read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if re.match(rf"class {owner}\b", line))
    return next(n for n, line in enumerate(lines) if n > begin and re.match(rf"    def {method}\b", line)) + 1


def named(section: str) -> list[str]:
    """What a section names, in order."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [link["name"] for link in LINK.finditer(text)]


def called(script: Sequence[Kill], until: int) -> list[str]:
    """Methods of the first of two workers from its step ``KILLED_IN`` to ``until``, in the order of their calls."""
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            calls.append(frame.f_code.co_qualname)

    def train() -> None:
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = er.AdaptiveDataParallel(module, optimizer)
        loader = er.AdaptiveDataLoader(
            torch.utils.data.TensorDataset(torch.arange(1920.0).view(240, 8) / 1920), batch_size=8
        )
        step, watched = 0, current_session().worker == "w1"
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                step += 1
                if watched and step == KILLED_IN - 1:
                    sys.setprofile(profile)
                elif watched and step == until:
                    sys.setprofile(None)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    run_job(train, script, first=[1, 2])
    return calls


def comes_by(calls: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of ``names`` that are not called after the one before them."""
    at, missing = 0, []
    for name in names:
        found = next((n for n in range(at, len(calls)) if calls[n] == name), None)
        if found is None:
            missing.append(name)
        else:
            at = found
    return missing


def test_each_link_leads_to_the_line_that_it_names() -> None:
    text = PAGE.read_text()
    right = LINK.sub(lambda m: f"[`{m['name']}`](../{m['file']}#L{line_of(m['file'], m['name'])})", text)
    if os.environ.get("UPDATE") == "1":
        PAGE.write_text(right)
    assert PAGE.read_text() == right, "UPDATE=1 pytest tests/test_a_step.py writes the lines anew"
    assert len(named("The step")) > 20 and len(named("A worker is killed in backward")) > 10


def test_step_comes_by_in_the_order_of_the_page() -> None:
    assert comes_by(called([], KILLED_IN + 1), named("The step")) == []


def test_kill_in_backward_comes_by_in_order_of_page() -> None:
    calls = called([Kill(KILLED_IN - 1, 2, "backward", after=(1,))], KILLED_IN + 3)
    assert comes_by(calls, named("A worker is killed in backward")) == []
