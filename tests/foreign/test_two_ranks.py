"""Cases of torch's, Lightning's, Accelerate's and transformers' own tests on two ranks: theirs under DDP, and ours.

Each framework's program of ``two_ranks`` runs twice under torchrun on gloo, with the same seeds, samples and batches,
and writes down what a user can see. The tables have what becomes of each case; docs/limits.md has the counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
RANKS = 2
PATIENCE_S = 280

pytestmark = [pytest.mark.foreign, pytest.mark.slow, pytest.mark.timeout(900)]

SAME, DIFFERS, CUT_ANEW = "", "differs", "cut anew"
# By program and case: nothing where all is as theirs, the error that ours raises, or that weights differ: Accelerate
# fills a last batch up with samples of the beginning, which ours uses once. With accumulation by count a step has
# as many samples as theirs, which ours cuts by itself: single batches are other ones.
EXPECTED: dict[str, dict[str, str]] = {
    "ddp": {
        **dict.fromkeys(("plain", "adamw", "what is saved", "accumulation", "accumulation in no_sync"), SAME),
        **dict.fromkeys(("clipping", "bfloat16", "a schedule per step", "a schedule per epoch"), SAME),
        **dict.fromkeys(("a layer that no rank uses", "a layer that one rank uses", "tied weights"), SAME),
        **dict.fromkeys(("recomputed", "recomputed, reentrant", "sparse gradients", "complex parameters"), SAME),
        **dict.fromkeys(("two forward passes", "nested outputs", "frozen midway", "a short last batch"), SAME),
        **dict.fromkeys(("batches that do not divide", "resumed", "resumed by torch's functions", "join"), SAME),
        "find_unused_parameters": "AdaptiveDataParallel has no find_unused_parameters=.*it is not needed: leave it out",
        "static_graph": "AdaptiveDataParallel has no static_graph=.*it is not needed: leave it out",
        "SyncBatchNorm": "SyncBatchNorm expected input tensor to be on ",
        "a communication hook": "register_comm_hook.*AdaptiveDataParallel.strategy=",
        "parameters that are left out": "second.weight of the model are to be left out.*set requires_grad=False",
    },
    "lightning": {
        **dict.fromkeys(("plain", "clipping", "clipping by value", "bfloat16", "a schedule per step"), SAME),
        **dict.fromkeys(("manual optimisation", "gathered values", "a layer that no rank uses"), SAME),
        **dict.fromkeys(("a short last batch", "early stopping", "min_steps", "max_steps", "limits", "resumed"), SAME),
        **dict.fromkeys(("validates within an epoch", "the best checkpoint", "a checkpoint of either"), SAME),
        "accumulation by the loader": SAME,
        "accumulation": CUT_ANEW,
        "sync_batchnorm": "sync_batchnorm is not supported.*use GroupNorm or LayerNorm",
    },
    "accelerate": {
        **dict.fromkeys(("plain", "clipping", "clipping by value", "bfloat16", "a schedule per step"), SAME),
        **dict.fromkeys(("a schedule per epoch", "no_sync", "gather_for_metrics", "collectives"), SAME),
        **dict.fromkeys(("save_state and load_state", "accumulation by the loader"), SAME),
        "a short last batch": DIFFERS,
        "accumulation": CUT_ANEW,
        "find_unused_parameters": "DistributedDataParallelKwargs is not supported.*leave them out",
    },
    "transformers": {
        **dict.fromkeys(("plain", "no clipping", "clipping", "bfloat16", "cosine with warm-up", "max_steps"), SAME),
        **dict.fromkeys(("evaluates by steps", "evaluates by epochs", "the best model at the end", "resumed"), SAME),
        **dict.fromkeys(("early stopping", "label smoothing", "a mean over tokens", "group_by_length"), SAME),
        "accumulation by the loader": SAME,
        "accumulation": CUT_ANEW,
        "a short last batch": DIFFERS,
        "find_unused_parameters": "ddp_find_unused_parameters=True is not supported.*leave it out",
    },
}
NEEDS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"}


_RECORDS: dict[str, dict[str, list[dict[str, Any]]]] = {}


@pytest.fixture
def records(program: str, tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each side has written down of one program's cases; the program runs once."""
    if program in NEEDS and importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"{program} is not installed")
    if program not in _RECORDS:
        _RECORDS[program] = {}
        for side in ("theirs", "ours"):
            launch(program, side, tmp_path)
            written = [tmp_path / f"{side}-{rank}.json" for rank in range(RANKS)]
            _RECORDS[program][side] = [json.loads(each.read_text()) for each in written]
    return _RECORDS[program]


def launch(program: str, side: str, folder: Path) -> None:
    """Run one side of a program on two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    answer = subprocess.run(
        [*torchrun, "-m", f"tests.foreign.two_ranks.{program}", side, str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-8000:]


def near(values: Any) -> Any:
    """Values whose numbers are equal to others within 1e-5."""
    if isinstance(values, dict):
        return {name: near(each) for name, each in values.items()}
    if isinstance(values, list):
        return [near(each) for each in values]
    number = isinstance(values, float) and not isinstance(values, bool)
    return pytest.approx(values, abs=1e-5, rel=1e-5, nan_ok=True) if number else values


def steps_of(record: dict[str, Any]) -> Any:
    """Where a run has ended, as its program tells it."""
    last = record["seen"][-1]
    return last[:2] if isinstance(last, list) else record["optimizer"]["0"]["step"]


def cases() -> list[tuple[str, str]]:
    return [(program, case) for program, table in EXPECTED.items() for case in table]


@pytest.mark.parametrize(("program", "case"), cases())
def test_a_case(program: str, case: str, records: dict[str, list[dict[str, Any]]]) -> None:
    wanted = EXPECTED[program][case]
    for theirs, ours in zip(records["theirs"], records["ours"], strict=True):
        if wanted == DIFFERS:
            assert ours[case]["weights"] != near(theirs[case]["weights"])
            assert ours[case]["seen"] == near(theirs[case]["seen"]), "steps, rates and callbacks are the same"
            continue
        if wanted == CUT_ANEW:
            assert "error" not in ours[case] and "error" not in theirs[case]
            assert steps_of(ours[case]) == steps_of(theirs[case]), "as many steps"
            continue
        if wanted != SAME:
            assert re.search(wanted, ours[case].get("error", "no error")), ours[case]
            continue
        assert "error" not in theirs[case], theirs[case]
        assert ours[case] == near(theirs[case])


def test_the_docs_have_the_counts() -> None:
    text = (REPOSITORY / "docs" / "limits.md").read_text()
    for program, table in EXPECTED.items():
        same, differ = (sum(each in kind for each in table.values()) for kind in ((SAME,), (DIFFERS, CUT_ANEW)))
        refused = len(table) - same - differ
        assert f"| `{program}.py` | {len(table)} | {same} | {refused} | {differ} |" in text, program
