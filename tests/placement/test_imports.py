"""``placement`` is light: a simulator on a laptop needs neither Ray nor torch."""

from __future__ import annotations

import subprocess
import sys


def test_the_pure_part_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, placement, placement.allocator.core, placement.policies, placement.goodput.model\n"
        "sys.exit(' '.join(m for m in ('ray', 'torch') if m in sys.modules) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
