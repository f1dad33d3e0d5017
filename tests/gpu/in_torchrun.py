"""A program for ``torchrun`` whose processes share GPU 0, over NCCL: it ends as one worker alone."""

from __future__ import annotations

import os

from tests.gpu.processes import nccl_environment

nccl_environment(int(os.environ["RANK"]))

import elastic_ray as er  # noqa: E402
from elastic_ray.run.current import session_of_thread  # noqa: E402
from tests.gpu import faults  # noqa: E402

if __name__ == "__main__":
    device = os.environ.get("ELASTIC_RAY_TEST_DEVICE", "cuda")
    for strategy in ("all_reduce", "zero2"):
        found = faults.train(strategy, device, 6, 0.0)
        session = session_of_thread()
        group = session.group.communicator if session is not None else None
        if er.get_context().get_world_rank() == 0:
            wanted = faults.alone("all_reduce", device, 6)
            over = getattr(group, "_nccl", None) is not None
            size = er.get_context().get_world_size()
            apart = faults.apart(found["weights"], wanted["weights"])
            print(f"torchrun {strategy}: {size} ranks, nccl {over}, apart {apart:.1e}", flush=True)
