"""Step time of Lightning, transformers and a bare loop under elastic-ray, against their own DDP, two ranks on gloo.

Each side runs under ``torchrun`` in turns, on the same model, data and global batch, one thread a rank; the medians of
the turns' median steps are compared. Bar: at most 1.05 x the step of the framework's own DDP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from common import HERE, arguments, bar, finish, median

SIDES = ("theirs", "ours")
FRAMEWORKS = ("bare", "lightning", "huggingface")


def measure(framework: str, side: str, steps: int) -> dict[str, Any]:
    """One turn of one side."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    answer = subprocess.run(
        [*command, str(HERE / "framework_steps.py"), framework, side, str(steps)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith('{"')]
    assert answer.returncode == 0 and lines, answer.stdout + answer.stderr
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def main() -> None:
    """Both sides of both frameworks in turns."""
    options = arguments(__doc__ or "")
    steps = 40 if options.quick else 120
    rows: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        for framework in FRAMEWORKS:
            for side in SIDES:
                rows.append(measure(framework, side, steps))
                print(f"  {rows[-1]}", flush=True)

    def ratio(framework: str) -> float | None:
        ours, theirs = (
            median(row["step_s"] for row in rows if (row["framework"], row["side"]) == (framework, side))
            for side in SIDES[::-1]
        )
        return ours / theirs if ours and theirs else None

    bars = [
        bar(f"{framework}: step, as a multiple of its own DDP's", value=ratio(framework), limit=1.05, at_least=False)
        for framework in FRAMEWORKS
    ]
    finish("frameworks", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
