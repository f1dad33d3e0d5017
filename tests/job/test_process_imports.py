"""What processes of a job and of a sweep do not load: each trial starts two, and on few cores they wait in turn."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("begin", "without"),
    [
        pytest.param(
            "import tuning.ray_tune", ("torch", "elastic_ray.warm_pool", "placement.policies"), id="a trial's driver"
        ),
        pytest.param("import elastic_ray.driver.trainer", ("torch",), id="a driver"),
        pytest.param("import elastic_ray.job.controller", ("torch", "ray.train", "pandas"), id="a controller"),
        pytest.param("import tuning.sweep", ("torch", "ray.train", "pandas"), id="a sweep's actor"),
        pytest.param(
            "from elastic_ray.worker.warm_up import warm_up; warm_up()",
            ("ray.train", "pandas", "placement.policies"),
            id="a worker",
        ),
    ],
)
def test_a_process_loads_only_what_it_needs(begin: str, without: tuple[str, ...]) -> None:
    code = f"import sys\n{begin}\nsys.exit(' '.join(name for name in {without!r} if name in sys.modules) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
