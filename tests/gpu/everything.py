"""All that only a GPU shows, in one run: a program that starts the others, beside each other where they only count.

    python -m tests.gpu.everything --seconds 480 --out FOLDER

Step times come first and alone. What each program has printed is in its file of the folder; a line for each says how it
ended, and the end of what it printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PYTHON = sys.executable
FAULTS = ("all_reduce", "zero2", "fully_shard", "hsdp", "zero1", "ring", "int8", "local_sgd")
SHOWN = 12  # lines
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


def run(program: Program, folder: Path, until_s: float, saying: threading.Lock) -> None:
    """One program, as long as it may take; say how it ended."""
    begin_s = time.monotonic()
    left_s = min(program.seconds, until_s - begin_s)
    file = folder / f"{program.name}.log"
    text = "no time"
    if left_s > 10.0 + (END_S if program.told else 0.0):
        told = ("--seconds", f"{left_s - END_S:.0f}") if program.told else ()
        env = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2", "PYTHONPATH": pythonpath()}
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


def pythonpath() -> str:
    """With this repository first."""
    return os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


def beside(rows: Sequence[Sequence[Program]], folder: Path, until_s: float) -> None:
    """The rows beside each other, the programs of each one after the other."""
    saying = threading.Lock()

    def one_after_the_other(programs: Sequence[Program]) -> None:
        for each in programs:
            run(each, folder, until_s, saying)

    threads = [threading.Thread(target=one_after_the_other, args=(row,), daemon=True) for row in rows]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def main() -> None:
    """Run all that is chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="begin nothing after so long, and end all")
    parser.add_argument("--out", default="gpu", help="folder of the files")
    parser.add_argument("--parts", nargs="+", default=["steps", "tests", "jobs", "faults", "alone"])
    parser.add_argument("--faults-s", type=float, default=70.0, help="length of each job that faults strike")
    parser.add_argument("--lanes", type=int, default=2, help="such jobs beside each other")
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
    rows: list[list[Program]] = []
    if "faults" in chosen.parts:
        programs = [faults_of(each, chosen.seed, chosen.faults_s, folder) for each in chosen.strategies]
        rows += [programs[lane :: chosen.lanes] for lane in range(chosen.lanes)]
    if "tests" in chosen.parts:
        rows.append(list(TESTS))
    if "jobs" in chosen.parts:
        rows.append(list(JOBS))
    beside(rows, folder, until_s)


if __name__ == "__main__":
    main()
