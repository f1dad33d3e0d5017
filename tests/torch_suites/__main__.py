"""Torch's own tests of torch.distributed inside a job's default group, at sizes 2, 3 and again 2.

    python -m tests.torch_suites wheel                                  # distributed_test.py, which the wheel has
    python -m tests.torch_suites ~/pytorch/test/distributed/test_c10d_gloo.py -k 'ProcessGroupGlooTest'
    python -m tests.torch_suites ... --group torch                      # the same with torch's own gloo group
    python -m tests.torch_suites ... --between                          # between steps, not in a step

Run by hand. Nothing is fetched: files are those of a checkout of the version that is installed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from tests.torch_suites.cases import Case, Outcome, load, run
from tests.torch_suites.group import JobLine, Processes

SIZES = (2, 3, 2)
GROUPS = ((1, 2), (1, 2, 3), (1, 3))
CASE_S = 30.0


class Suite(Processes):
    """Runs the cases that are left in each phase; ends early where ranks have come apart."""

    def __init__(self, cases: list[Case], left: list[list[int]], options: argparse.Namespace, file: str) -> None:
        self.cases, self.left, self.options, self.file = cases, left, options, file
        self.found: dict[tuple[int, int], dict[int, Outcome]] = collections.defaultdict(dict)
        self.at: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
        self.apart, self.since = "", time.monotonic()
        first = GROUPS[0] if options.group == "ours" else GROUPS[1]
        super().__init__(self.train, first, {1: GROUPS[1], 3: GROUPS[2]})

    # -- in a worker -------------------------------------------------------------------------------------------------

    def train(self, line: JobLine) -> None:
        if self.options.group == "torch":
            return self._with_torch_alone(line)
        import elastic_ray as er
        from elastic_ray.run.current import session_of_thread
        from elastic_ray.session.default_group import install

        install()
        session: Any = session_of_thread()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")

        def lost() -> str:
            return str(session.run.ledger.failed or "")

        for epoch in er.remaining_epochs_until(5):
            for (x,) in er.AdaptiveDataLoader(TensorDataset(torch.ones(6, 3)), batch_size=6):
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                optimizer.step()
                if epoch % 2 == 0 and not self.options.between:
                    self._phase(line, epoch // 2, dist.get_rank(), lost)
            if epoch % 2 == 0 and self.options.between:
                self._phase(line, epoch // 2, dist.get_rank(), lost)

    def _with_torch_alone(self, line: JobLine) -> None:
        for phase, group in enumerate(GROUPS):
            if line.worker in group:
                self._phase(line, phase, group.index(line.worker), lambda: "", own=True)

    def _phase(self, line: JobLine, phase: int, rank: int, lost: Any, *, own: bool = False) -> None:
        for number in self.left[phase]:
            case, file = self.cases[number], f"{self.file}-{phase}-{number}"
            while not line.call("all_here", phase, number):
                time.sleep(0.002)  # other ranks end the case before
            if own and not _opens_its_own(case):
                dist.init_process_group("gloo", init_method=f"file://{file}-own", rank=rank, world_size=SIZES[phase])
            found = run(case, rank, SIZES[phase], file)
            if own and dist.is_initialized():
                dist.destroy_process_group()
            if reason := lost():
                found = Outcome("failed", f"the step is lost: {reason[:300]} ({found.verdict} {found.reason})", "lost")
            line.call("found", phase, number, found)

    # -- in the job --------------------------------------------------------------------------------------------------

    def _on_all_here(self, worker: int, phase: int, number: int) -> bool:
        if self.apart:
            return False
        if worker not in self.at[phase, number]:
            self.at[phase, number].add(worker)
            self.since = time.monotonic()
        return len(self.at[phase, number]) == SIZES[phase]

    def _on_found(self, worker: int, phase: int, number: int, found: Outcome) -> None:
        seen = self.found[phase, number]
        seen[worker] = found
        kinds = {(each.verdict, each.where) for each in seen.values()}
        if len(seen) == SIZES[phase] and (len(kinds) > 1 or any(each.where == "lost" for each in seen.values())):
            self.apart = "ranks have seen different things"

    def run(self) -> dict[tuple[int, int], Outcome]:
        """Run until the end, or until the ranks are apart."""
        if self.options.group == "ours":
            self.start()
        while not self.over() and not self.apart:
            time.sleep(0.02)  # the processes work
            if time.monotonic() - self.since > CASE_S:
                self.apart = "no end"
        self.close()
        found = {where: _worst(seen) for where, seen in self.found.items() if len(seen) == SIZES[where[0]]}
        hung = [where for where, at in self.at.items() if where not in found and len(at) == SIZES[where[0]]]
        for where in hung:
            told = [str(each) for _, each in self.told]
            parts = [f"worker {worker}: {each}" for worker, each in self.found.get(where, {}).items()]
            found[where] = Outcome("failed", f"no end: {'; '.join(parts)} {told}"[:600], "hung")
        return found


def _opens_its_own(case: Case) -> bool:
    """True if its class forms a group itself."""
    return hasattr(case.kind, "init_pg") or hasattr(case.kind, "_create_process_group_gloo")


def _worst(seen: dict[int, Outcome]) -> Outcome:
    order = ("failed", "skipped", "passed")
    return min(seen.values(), key=lambda each: order.index(each.verdict))


def main() -> None:
    """Run the cases of some files, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="test files, or 'wheel'")
    parser.add_argument("-k", dest="pattern", default="", help="regular expression of the cases")
    parser.add_argument("--without", default=r"$^", help="regular expression of cases that do not run")
    parser.add_argument("--group", choices=("ours", "torch"), default="ours")
    parser.add_argument("--between", action="store_true", help="between steps")
    parser.add_argument("--out", type=Path, help="JSON file for the outcomes")
    options = parser.parse_args()
    cases = [each for file in options.files for each in load(file, options.pattern)]
    cases = [each for each in cases if not re.search(options.without, each.id)]
    left = [list(range(len(cases))) for _ in SIZES]
    outcomes: dict[tuple[int, int], Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        while any(left):
            suite = Suite(cases, left, options, os.path.join(folder, f"{time.monotonic_ns()}"))
            found = suite.run()
            outcomes |= found
            for phase, number in found:
                left[phase].remove(number)
            if not found:
                print("no case has come to an end:", suite.apart, suite.told)
                break
            bad = [where for where in found if found[where].verdict == "failed"]
            for phase, number in bad:
                each, size = found[phase, number], SIZES[phase]
                print(f"FAILED {cases[number].id} at {size} ({phase}): {each.reason} [{each.where}]", flush=True)
    for phase, size in enumerate(SIZES):
        verdicts = collections.Counter(each.verdict for where, each in outcomes.items() if where[0] == phase)
        print(f"{size} ranks: {dict(verdicts)}")
    if options.out:
        told = {f"{phase}|{cases[number].id}": dataclasses.asdict(each) for (phase, number), each in outcomes.items()}
        options.out.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
