"""Puts random mistakes into the decision code, one at a time, and counts those that the fast tests notice.

By hand and before a release, see docs/contributing.md. The mistakes are cosmic-ray's, drawn by a seed, and are put into
a copy of the tree; the tests that run their lines follow. What is not noticed is printed, to be judged: it changes
nothing, or a promise has no test.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401
import pytest
import ray  # noqa: F401
import scipy.optimize  # noqa: F401
import torch  # noqa: F401
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec
from coverage import Coverage, CoverageData

ROOT = Path(__file__).parents[2]
# Such as one makes. Others of cosmic-ray's end with a TypeError, so that any test notices them, or change nothing.
LIKELY = re.compile(
    "core/(AddNot|NumberReplacer|ZeroIterationForLoop|Replace(True|False|And|Or|Break|Continue)With.*"
    "|ReplaceUnaryOperator_(Delete_Not|USub_UAdd)"
    "|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv|Pow_Mul)"
    "|ReplaceComparisonOperator_(Is_IsNot|IsNot_Is|(Eq|NotEq|Lt|LtE|Gt|GtE)_(Eq|NotEq|Lt|LtE|Gt|GtE)))"
)
HARMLESS = re.compile(r"strict=|@dataclass|@functools.lru_cache")
# Words for people, and what only type checkers read.
SAYS = re.compile(r"raise\b|_?logger\.|warnings\.warn\(|def __(repr|str)__\(|if TYPE_CHECKING:")
COVERED = ".covered"
Place = tuple[int, int]  # line and column
# Of each part the modules that decide, and their tests; {a,b} stands for several names.
PARTS = {
    "membership": (
        "elastic_ray/membership/{machine,recovery,roster,generation_changes}.py",
        "tests/membership/test_{machine_*,recovery,selection,simulated_job,small_parts}.py",
    ),
    "consensus": (
        "elastic_ray/consensus/*.py",
        "tests/membership/test_{announced,consensus,small_parts,unit_wishes}.py tests/sync/tiles/test_pieces.py",
    ),
    "data": (
        "elastic_ray/data/{order,batches,sharding}.py",
        "tests/data/test_{order,permutation,sharding,shares,stream,unit_shards}.py",
    ),
    "batch": (
        "elastic_ray/batch/{planner,tuner,growth,halving,limits}.py",
        "tests/batch/test_*.py tests/membership/test_small_parts.py tests/job/test_allocator_view.py",
    ),
    "tables": ("elastic_ray/sync/sharded/placement.py", "tests/sync/sharded/test_placement.py"),
    "tiles": (
        "elastic_ray/sync/optimizer_tiles/{tiling,moves}.py",
        "tests/sync/tiles/test_{tiling,pieces}.py",
    ),
    "rows": (
        "elastic_ray/sync/sharded_parameters/row_layout.py",
        "tests/sync/sharded_parameters/test_row_layout.py",
    ),
    "checkpoints": (
        "elastic_ray/checkpoints/{interval,line_files,checked_files,sharded/rectangles}.py",
        "tests/job/test_{automatic_checkpoint_files,bounded_reports}.py tests/sync/tiles/test_pieces.py",
    ),
    "replicas": ("elastic_ray/state/replicas.py", "tests/loop/test_replicas.py"),
    "allocator": (
        "placement/allocator/{core,significance,explaining,snapshot}.py",
        "tests/placement/test_{core,explaining,significance,notices,start_times}.py",
    ),
    "goodput": (
        "placement/goodput/*.py",
        "tests/placement/test_{remaining,goodput,goodput_policy,goodput_table,fitting,forecast,lengths,least_squares,mixed_groups}.py",
    ),
    "policy": (
        "placement/policies/goodput/*.py",
        (
            "tests/placement/test_{goodput_policy,policies,prices,node_assignment,mixed_types,steady_sizes,slow_nodes,"
            "reasons,explaining,elastic_policies,option_tables}.py"
        ),
    ),
    "planning": (
        "placement/planning/*.py",
        (
            "tests/placement/test_{tenants,wishes,constraints,deadlines,multi_node,slow_nodes,start_times,allowed_sizes,"
            "spot,planning_parts,node_record,reasons,weights,utility,whole_units,mixed_types,packing}.py"
        ),
    ),
    "autoscaling": (
        "placement/autoscaling/{autoscaler,fleet,objectives/*}.py",
        "tests/placement/test_{autoscaler,budget,job_costs,offers,spot}.py",
    ),
    "knowledge": (
        "placement/knowledge/knowledge.py",
        "tests/placement/test_{knowledge,knowledge_store,knowledge_sync,lengths}.py",
    ),
    "session": (
        "elastic_ray/session/{group_changes,loader_passes}.py",
        "tests/session/test_{group_changes,loader_passes}.py tests/loop/test_{breaks,data_plan,preemption,proofs}.py",
    ),
    "adaptation": (
        "elastic_ray/adaptation/{requests,runner,policies/*}.py",
        (
            "tests/adaptation/test_{requests,runner,ballot,batch_policies,scaling_policies,metric_policies,interference,"
            "attacks,seesaw}.py"
        ),
    ),
    "stragglers": ("elastic_ray/stragglers/*.py", "tests/stragglers/test_*.py"),
    "warm pool": ("elastic_ray/warm_pool/sizing.py", "tests/job/test_pool_sizing.py"),
    "record": (
        "elastic_ray/record/{outlook,usage,ended,losses,report_queue}.py",
        "tests/job/test_{outlook,usage,ended,losses,history,worker_errors,report_queue,bounded_reports}.py",
    ),
    "tuning": ("tuning/{trials,nni/spaces,nni/results}.py", "tests/tuning/test_{trials,nni_pure}.py"),
}


class Most(NamedTuple):
    """Longest time that tests take; those with a mistake may never end."""

    cpu_s: int
    wall_s: float


def paths(patterns: str) -> list[Path]:
    """Return the files of the patterns, each of which must match one."""
    found: list[Path] = []
    for pattern in patterns.split():
        before, names, after = re.fullmatch(r"([^{]*)(?:{(.*)})?(.*)", pattern).groups()
        for name in (names or "").split(","):
            files = sorted(Path().glob(f"{before}{name}{after}"))
            if not files:
                raise SystemExit(f"each pattern of PARTS must match a file, but {before}{name}{after} matches none")
            found += files
    return found


@functools.cache
def _said(module: Path) -> list[tuple[Place, Place]]:
    """Return where a module's messages and types are, as (start, end)."""
    text = module.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    says = [n for n in nodes if isinstance(n, ast.stmt) and SAYS.match(ast.get_source_segment(text, n) or "")]
    types = [getattr(n, name, None) for n in nodes for name in ("annotation", "returns")]
    return [
        ((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in (*says, *types) if n is not None
    ]


def _decides(spec: MutationSpec) -> bool:
    """True unless the place decides nothing; a star that unpacks is taken for a product."""
    line = spec.module_path.read_text().splitlines()[spec.start_pos[0] - 1]
    at = spec.start_pos[1]
    unpacks = "Operator_Mul" in spec.operator_name and line[at - 1 : at + 2] != " * "
    said = any(start <= spec.start_pos < end for start, end in _said(spec.module_path))
    return not unpacks and not said and not HARMLESS.search(line)


def drawn(modules: list[Path], count: int, seed: str) -> list[MutationSpec]:
    """Return mistakes drawn by the seed: first a place in the code, then one of the mistakes that can be made there."""
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/all.sqlite") as everything:
        init(modules, everything, {})
        places = defaultdict(list)
        for item in everything.work_items:
            (spec,) = item.mutations
            if LIKELY.fullmatch(spec.operator_name) and _decides(spec):
                places[str(spec.module_path), spec.start_pos].append(spec)
    dice = random.Random(seed)
    chosen = dice.sample(sorted(places), min(count, len(places)))
    return [
        dice.choice(sorted(places[place], key=lambda spec: (spec.operator_name, spec.occurrence))) for place in chosen
    ]


class _Contexts:
    """Plugin that tells a test's lines apart from another's."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count what runs from here on for this test."""
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")


def _pytest(tests: Iterable[str], most: Most, covered: list[Path] | None = None) -> tuple[int, str]:
    """Run tests in a fork of this process, which has imported what is slow to import; return its code and output.

    With ``covered`` the tests that run each line of these modules are written to the file ``COVERED``.
    """
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (most.cpu_s, most.cpu_s))
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            args = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", *tests]
            if not covered:
                os._exit(pytest.main(args))
            coverage = Coverage(data_file=COVERED, config_file=False, include=[str(path) for path in covered])
            with coverage.collect():
                code = pytest.main(args, plugins=[_Contexts(coverage)])
            coverage.save()
            os._exit(code)
        end_s = time.monotonic() + most.wall_s
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end_s:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not ended[0]:
            ended = os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), output.read().decode(errors="replace")


def _tests_of(spec: MutationSpec) -> list[str]:
    """Return the tests that run the statement of a mistake; none where code outside of tests runs it as well."""
    tree = ast.parse(spec.module_path.read_text())
    (first, _), (last, _) = spec.start_pos, spec.end_pos
    for node in ast.walk(tree):  # outer statements come first
        if isinstance(node, ast.stmt) and node.lineno <= spec.start_pos[0] <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            first, last = node.lineno, body[0].lineno - 1 if body else node.end_lineno or node.lineno
            last = max(first, last)
    data = CoverageData(COVERED)
    data.read()
    contexts = data.contexts_by_lineno(str(spec.module_path.resolve()))
    found = {test for line in range(first, last + 1) for test in contexts.get(line, ())}
    if "" in found:
        return []
    # Those of modules that name it are likely to notice, and come first.
    names = f".{spec.module_path.stem} import"
    return sorted(found, key=lambda test: (names not in Path(test.partition("::")[0]).read_text(), test))


def _noticed(spec: MutationSpec, tests: list[str], most: Most) -> tuple[bool, str]:
    """True if the tests notice the mistake, with the mistake as a diff."""
    operator = get_operator(spec.operator_name)(**(spec.operator_args or {}))
    chosen = _tests_of(spec) or tests
    with use_mutation(spec.module_path, operator, spec.occurrence) as (before, after):
        code, _ = _pytest(chosen, most)
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            code, _ = _pytest(tests, most)
    name = str(spec.module_path)
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="")
    return code != 0, "\n".join(line for line in diff if not line.startswith("---"))


def score(part: str, options: argparse.Namespace) -> tuple[int, int]:
    """Return how many mistakes were noticed, and how many there were."""
    modules, tests = paths(PARTS[part][0]), [str(path) for path in paths(PARTS[part][1])]
    began_s, used_s = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code, output = _pytest(tests, Most(cpu_s=600, wall_s=600.0), modules)
    if code:
        raise SystemExit(f"the tests of {part} must pass without a mistake:\n{output}")
    used_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used_s
    most = Most(cpu_s=10 + 2 * int(used_s), wall_s=20.0 + 2 * (time.monotonic() - began_s))
    mistakes = drawn(modules, options.count, f"{options.seed}/{part}")
    missed = 0
    for spec in mistakes:
        noticed, diff = _noticed(spec, tests, most)
        missed += not noticed
        if not noticed:
            print(diff, flush=True)
    print(f"{part}: {len(mistakes) - missed} of {len(mistakes)} noticed", flush=True)
    return len(mistakes) - missed, len(mistakes)


def main() -> None:
    """Score the parts that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--count", type=int, default=13, help="mistakes a part")
    parser.add_argument("--seed", default="1", help="another one draws others")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, but got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        skipped = shutil.ignore_patterns(".*", "__pycache__")
        copy = shutil.copytree(ROOT, Path(folder) / "tree", ignore=skipped)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        # A mistake may be as long as what it replaces, and be made within the same second.
        sys.dont_write_bytecode = True
        sys.path[0] = str(copy)
        scores = [score(part, options) for part in options.parts or PARTS]
    noticed, made = (sum(each) for each in zip(*scores, strict=True))
    print(f"all: {noticed} of {made} noticed, {noticed / max(made, 1):.0%}")


if __name__ == "__main__":
    main()
