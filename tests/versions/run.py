"""Tests under other versions of what elastic-ray builds on: one environment a row, a table for docs/gpus.md.

    python tests/versions/run.py                      # all rows, in environments of their own (hours)
    python tests/versions/run.py torch-2.15 ray-2.58  # some
    python tests/versions/run.py --over transformers-5.24    # on top of the present environment, without what it needs
    python tests/versions/run.py --logs /tmp/rows ray-2.59   # and the whole output of each command, there

Run by hand, before a release. Needs a package index. A row's first command is the two-rank smoke.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOKE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tests/versions/smoke.py")
LIMIT_S = 1800


def tests(*paths: str) -> tuple[str, ...]:
    """Arguments of Python that run these tests, thorough ones too."""
    return ("-m", "pytest", "-q", "-m", "not slow and not benchmark", "-p", "no:cacheprovider", *paths)


ENGINE = (SMOKE, tests("tests/sync", "tests/data", "tests/loop/test_out_of_memory.py", "tests/loop/test_loops.py"))
JOBS = (tests("tests/job/test_lifecycle.py", "tests/test_examples.py"),)


def two_ranks(library: str) -> tuple[str, ...]:
    """Arguments of Python that compare a library's own loop on two ranks with ours."""
    return ("-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "tests/foreign/test_two_ranks.py", "-k", library)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is installed in place of the pinned versions, and what runs with it."""

    packages: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    python: str = ""


TORCH = ("2.9", "2.11", "2.13", "2.14", "2.15")
ROWS = {
    **{f"torch-{v}": Row(packages=(f"torch=={v}.*",), commands=ENGINE) for v in TORCH},
    **{f"ray-{v}": Row(packages=(f"ray[default,tune]=={v}.*",), commands=JOBS) for v in ("2.58", "2.59", "2.60")},
    **{
        f"transformers-{v}": Row(
            packages=(f"transformers=={v}.*",),
            commands=(two_ranks("transformers"), tests("tests/integrations/test_huggingface.py")),
        )
        for v in ("5.22", "5.23", "5.24")
    },
    **{
        f"accelerate-{v}": Row(
            packages=(f"accelerate=={v}.*",),
            commands=(two_ranks("accelerate"), tests("tests/integrations/test_accelerate.py")),
        )
        for v in ("1.13", "1.14", "1.15")
    },
    **{
        f"lightning-{v}": Row(
            packages=(f"lightning=={v}.*", f"pytorch-lightning=={v}.*"),
            commands=(two_ranks("lightning"), tests("tests/integrations/test_lightning.py")),
        )
        for v in ("2.5", "2.6")
    },
    **{
        f"python-{v}": Row(packages=(), commands=(*ENGINE, *JOBS), python=f"python{v}")
        for v in ("3.10", "3.11", "3.12", "3.13")
    },
}


def environment(row: Row, folder: Path, *, over: bool) -> Path:
    """An interpreter that has the row's packages: of a fresh environment, or on top of the present one."""
    python = folder / "bin" / "python"
    if over:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        places = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (places / "present.pth").write_text(sysconfig.get_paths()["purelib"])
        names = [each.replace("[default,tune]", "") for each in row.packages]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(places)]
        subprocess.run([*pip, *names], check=True)
        return python
    subprocess.run([row.python or sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-e", ".[test]", *row.packages], check=True, cwd=ROOT)
    return python


def outcome(python: Path, command: tuple[str, ...], log: Path) -> str:
    """What a command has said in the end, in a few words. All of it is in `log`."""
    options = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        # A session of its own: what is not done in time ends with its workers.
        running = subprocess.Popen(
            [python, *command], cwd=ROOT, env=options, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            running.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"not done after {LIMIT_S} s"
        finally:  # whoever interrupts this one means that one, too
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    if command == SMOKE:
        return ", ".join(
            line[:60] for line in lines if line.partition(":")[0] in ("all_reduce", "zero1", "zero2", "fully_shard")
        )
    return next(
        (line for line in reversed(lines) if " passed" in line or " failed" in line), lines[-1] if lines else ""
    )


def main() -> None:
    """Run rows; print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all by default")
    arguments.add_argument(
        "--over", action="store_true", help="install on top of the present environment, without dependencies"
    )
    arguments.add_argument("--logs", type=Path, help="folder for the output of each command; by default it is not kept")
    given = arguments.parse_args()
    if unknown := [each for each in given.rows if each not in ROWS]:
        arguments.error(f"there is no row {unknown[0]}; there are {', '.join(ROWS)}")
    print("| row | result |\n|---|---|", flush=True)
    for name in given.rows or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            logs = given.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            try:
                python = environment(ROWS[name], Path(folder), over=given.over)
                found = "; ".join(
                    outcome(python, command, logs / f"{name}-{i}.log") for i, command in enumerate(ROWS[name].commands)
                )
            except (OSError, subprocess.CalledProcessError) as error:
                found = f"not installed: {error}"
        print(f"| {name} | {found} |", flush=True)


if __name__ == "__main__":
    main()
