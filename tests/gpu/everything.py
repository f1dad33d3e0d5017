"""All that only a GPU shows, in two runs of ten minutes: a program that starts the others.

    python -m tests.gpu.everything --out FOLDER     # faults until the time is up, and tests beside them
    python -m tests.gpu.everything --parts steps alone jobs --out FOLDER     # times, alone; then jobs of Ray

What each program has printed is in its file of the folder; a line for each says how it ended, and the end of what it
printed. The last line counts the faults.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PYTHON = sys.executable
FAULTS = ("all_reduce", "zero2", "fully_shard", "hsdp", "zero1", "ring", "int8", "local_sgd")
PARTS = ("faults", "tests", "jobs", "alone", "steps")
SHOWN = 12  # lines
BAR_S = 0.7  # from a fault to the next step of all: half a second and a step
END_S = 45.0  # a job that faults strike starts, ends and is compared in so long


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One of them.

    Attributes:
        name: of its file.
        arguments: after the interpreter's path.
        seconds: its longest time.
        told: it takes ``--seconds``, ends by itself END_S later at most, and tells what it has found only then.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float = 120.0
    told: bool = False


def pytest_of(name: str, *arguments: str, seconds: float) -> Program:
    """Tests of this folder, as a program."""
    options = ("-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "--no-header")
    return Program(name, ("-m", "pytest", *options, *arguments), seconds)


def faults_of(strategy: str, seed: int, seconds: float, folder: Path, *options: str) -> Program:
    """One job that faults strike."""
    chosen = ("--seed", f"{seed}", "--spares", "6", "--out", f"{folder}", "--show", *options)
    return Program(
        f"faults-{strategy}-{seed}", ("-m", "tests.gpu.faults", strategy, *chosen), seconds + END_S, told=True
    )


def lane_of(
    strategies: Sequence[str], lane: int, lanes: int, seed: int, seconds: float, folder: Path
) -> Iterator[Program]:
    """Jobs that faults strike, one after the other without an end."""
    for number, strategy in enumerate(itertools.cycle(strategies[lane::lanes] or strategies)):
        yield faults_of(strategy, seed + number * lanes + lane, seconds, folder)


STEPS = (
    Program("step-time", ("tests/gpu/test_step_time.py", "--limit-s", "85"), 115.0),
    Program("launches", ("tests/gpu/test_step_time.py", "--launches"), 40.0),
)
TESTS = (
    pytest_of(
        "short", "tests/gpu", "-m", "not slow and not benchmark", "--ignore=tests/gpu/test_ray_jobs.py", seconds=90
    ),
    Program("out-of-memory-ranks", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                    "tests/gpu/test_out_of_memory.py"), 60.0),
    Program("torchrun", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                         "tests/gpu/in_torchrun.py"), 60.0),
    Program("forming", ("-m", "tests.gpu.forming"), 90.0),
)  # fmt: skip
JOBS = (
    Program("compiling", ("-c", "from tests.gpu import compiling; compiling.main()"), 120.0),
    Program("ray-sizes", ("-m", "tests.gpu.ray_job", "all_reduce", "zero2"), 120.0),
    pytest_of("ray-jobs", "tests/gpu/test_ray_jobs.py", seconds=330),
)


def run(program: Program, folder: Path, until_s: float, saying: threading.Lock) -> bool:
    """One program, as long as it may take; say how it ended. False if no time was left."""
    begin_s = time.monotonic()
    left_s = min(program.seconds, until_s - begin_s)
    file = folder / f"{program.name}.log"
    text = "no time"
    if left_s > 10.0 + (END_S if program.told else 0.0):
        told = ("--seconds", f"{left_s - END_S:.0f}") if program.told else ()
        env = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2", "PYTHONPATH": pythonpath()}
        env["PYTHONWARNINGS"] = "ignore:'tests.gpu:RuntimeWarning"  # of each process that a program starts
        with file.open("w") as out:
            process = subprocess.Popen(
                [PYTHON, *program.arguments, *told],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
            try:
                text = f"exit status {process.wait(left_s)}"
            except subprocess.TimeoutExpired:
                text = f"cut off after {left_s:.0f} s"
                os.killpg(process.pid, 9)
    lines = file.read_text(errors="replace").splitlines()[-SHOWN:] if file.exists() else []
    with saying:
        print(f"=== {program.name}: {text}, {time.monotonic() - begin_s:.0f} s", flush=True)
        print("\n".join(line[:400] for line in lines), flush=True)
    return text != "no time"


def pythonpath() -> str:
    """With this repository first."""
    return os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


def beside(rows: Sequence[Iterable[Program]], folder: Path, until_s: float) -> None:
    """The rows beside each other, the programs of each one after the other as long as there is time."""
    saying = threading.Lock()

    def one_after_the_other(programs: Iterable[Program]) -> None:
        for each in programs:
            if not run(each, folder, until_s, saying):
                return

    threads = [threading.Thread(target=one_after_the_other, args=(row,), daemon=True) for row in rows]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def counted(folder: Path) -> str:
    """Line on the faults of all jobs whose files are in the folder."""
    jobs = [json.loads(each.read_text()) for each in sorted(folder.glob("*.json"))]
    faults = [each for job in jobs for each in job["faults"]]
    late = [f"{each['kind']} {each['next_s']:.2f}" for each in faults if each["next_s"] > BAR_S]
    named = [f"{job['strategy']}-{job['seed']}" for job in jobs if job["hangs"] or job["error"]]
    apart = max((job.get("apart", 0.0) for job in jobs), default=0.0)
    ranks = max((job.get("ranks_apart", 0.0) for job in jobs), default=0.0)
    return (
        f"{len(faults)} faults in {len(jobs)} jobs; hangs or errors in {named or 'none'}; later than {BAR_S} s: "
        f"{len(late)} {late[:8]}; results apart {apart:.1e}, ranks {ranks:.1e}"
    )


def main() -> None:
    """Run all that is chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=560.0, help="begin nothing after so long, and end all")
    parser.add_argument("--out", default="gpu", help="folder of the files")
    parser.add_argument("--parts", nargs="+", default=["faults", "tests"], choices=PARTS)
    parser.add_argument("--faults-s", type=float, default=150.0, help="length of each job that faults strike")
    parser.add_argument("--lanes", type=int, default=4, help="such jobs beside each other")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--strategies", nargs="+", default=FAULTS)
    chosen = parser.parse_args()
    until_s = time.monotonic() + chosen.seconds
    folder = Path(chosen.out)
    folder.mkdir(parents=True, exist_ok=True)
    if "steps" in chosen.parts:
        beside([STEPS], folder, until_s)
    if "alone" in chosen.parts:  # times of changes, with nothing else on the GPU
        kinds = ("--kinds", "join,join,leave,leave,kill backward,kill forward,swap,stop forward")
        beside([[faults_of("all_reduce", 0, 45.0, folder, *kinds)]], folder, until_s)
    rows: list[Iterable[Program]] = []
    if "faults" in chosen.parts:
        rows += [
            lane_of(chosen.strategies, lane, chosen.lanes, chosen.seed, chosen.faults_s, folder)
            for lane in range(chosen.lanes)
        ]
    if "tests" in chosen.parts:
        rows.append(TESTS)
    if "jobs" in chosen.parts:
        rows.append(JOBS)
    beside(rows, folder, until_s)
    print(counted(folder), flush=True)


if __name__ == "__main__":
    main()
