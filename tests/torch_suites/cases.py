"""Torch's own test cases of torch.distributed, run by the ranks of a group that is there already."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import os
import re
import sys
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal import common_distributed as common

WHEEL = "torch.testing._internal.distributed.distributed_test"
_SKIPS = {each.exit_code: each.message for each in common.TEST_SKIPS.values()}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One test: its class, made fit for the group, and its name."""

    kind: Any
    name: str

    @property
    def id(self) -> str:
        return f"{self.kind.__module__.removeprefix('suite_')}::{self.kind.__name__}::{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank has seen of a test: "passed", "skipped" or "failed", why, and where."""

    verdict: str
    reason: str = ""
    where: str = ""


def load(source: str, pattern: str) -> list[Case]:
    """The cases of a test file of a checkout, or of a module of the wheel."""
    if source == "wheel":
        module = _wheel()
    else:
        name = "suite_" + Path(source).stem
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(Path(source).parent))
        spec.loader.exec_module(module)
    return [each for each in _cases(module) if re.search(pattern, each.id)]


def _wheel() -> types.ModuleType:
    os.environ.update(BACKEND="gloo", INIT_METHOD="env://", WORLD_SIZE="2", TEMP_DIR="/tmp")
    module: Any = importlib.import_module(WHEEL)
    made: Any = type("Distributed", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    made.__module__ = "suite_distributed_test"
    made._barrier = lambda self, *args, **options: dist.barrier()
    module.Barrier.sync = staticmethod(lambda *args, **options: dist.barrier())
    holder: Any = types.ModuleType("suite_distributed_test")
    vars(holder)["Distributed"] = made
    return holder


def _cases(module: types.ModuleType) -> Iterator[Case]:
    for kind in vars(module).values():
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        if issubclass(kind, (common.MultiProcessTestCase, common.MultiThreadedTestCase)):
            _fit(kind)
            yield from (Case(kind, name) for name in unittest.TestLoader().getTestCaseNames(kind))


def _fit(kind: Any) -> None:
    """A class's cases are to run in this process, as the rank that the group has given it."""
    kind._spawn_processes = kind._spawn_threads = lambda self: None
    kind.world_size = property(lambda self: dist.get_world_size() if dist.is_initialized() else _PLACE.world_size)
    original = kind.setUp

    def set_up(self: Any) -> None:
        original(self)
        self.rank, self.file_name = _PLACE.rank, _PLACE.file
        os.environ["TEMP_DIR"] = f"{_PLACE.file}-d"  # all ranks', where the class makes one of each
        if isinstance(self, common.MultiThreadedTestCase):
            self.perThreadSetUp()

    def in_this_process(self: Any, test: Callable[[], Any]) -> Callable[[], Any]:
        def run(self: Any) -> None:
            try:
                test()
            except SystemExit as ended:
                raise unittest.SkipTest(_SKIPS.get(int(str(ended.code)), f"exit {ended.code}")) from ended

        return types.MethodType(run, self)

    kind.setUp, kind.join_or_run = set_up, in_this_process
    if hasattr(kind, "_create_process_group_gloo"):
        kind._create_process_group_gloo = lambda self, store, rank, size, options: dist.group.WORLD or _gloo(kind)


def _gloo(kind: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{_PLACE.file}", rank=_PLACE.rank, world_size=_PLACE.world_size)
    return dist.distributed_c10d._get_default_group()


@dataclasses.dataclass(slots=True)
class _Place:
    """This process's place while a case runs."""

    rank: int = 0
    world_size: int = 1
    file: str = ""


_PLACE = _Place()


def run(case: Case, rank: int, world_size: int, file: str) -> Outcome:
    """Run one case on this rank."""
    _PLACE.rank, _PLACE.world_size, _PLACE.file = rank, world_size, file
    os.environ["WORLD_SIZE"] = str(world_size)
    os.makedirs(f"{file}-d/test_dir", exist_ok=True)
    result = _Result()
    try:
        with io.StringIO() as told:
            sys.stderr, kept = told, sys.stderr
            try:
                case.kind(case.name).run(result)
            finally:
                sys.stderr = kept
    except BaseException as error:
        result.fail(error)
    return result.outcome


class _Result(unittest.TestResult):
    outcome = Outcome("passed")

    def fail(self, error: BaseException | None) -> None:
        assert error is not None
        if self.outcome.verdict == "failed":
            return
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "unittest" not in each.filename]
        where = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames[-6:]))
        self.outcome = Outcome("failed", f"{type(error).__name__}: {str(error)[:400]}", where)

    def addError(self, test: Any, err: Any) -> None:
        self.fail(err[1])

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.fail(err[1])

    def addSkip(self, test: Any, reason: str) -> None:
        self.outcome = Outcome("skipped", reason)
