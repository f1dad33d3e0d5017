"""Two workers on one GPU, whose tensors go over gloo. Real jobs of them: ``test_ray_jobs.py``.

Here they are threads. These cannot train on a GPU: torch runs backward passes of a process in one thread for each GPU,
where two workers that wait for each other wait for ever.
"""

from __future__ import annotations

import torch

from elastic_ray.communication.communicator import Communicator
from elastic_ray.state.tree import receive_state, send_state
from tests.membership.groups import on_ranks


def test_collectives_and_state_of_the_device(device: torch.device) -> None:
    large = torch.arange(1 << 18, dtype=torch.float32)

    def work(communicator: Communicator) -> list[float]:
        summed = torch.full((4,), float(communicator.rank + 1), device=device)
        communicator.wait(communicator.all_reduce(summed))
        root = torch.full((2,), float(communicator.rank), device=device)
        communicator.broadcast(root, 1)
        gathered = torch.zeros(4, device=device)
        communicator.wait(communicator.gradients.all_gather(gathered, root + communicator.rank))
        if communicator.rank == 0:
            send_state(
                communicator, 1, {"x": {"large": large.to(device), "small": torch.ones(3, device=device), "n": 7}}
            )
        else:
            own = {"large": torch.zeros_like(large, device=device), "small": torch.zeros(3, device=device), "n": 0}
            trees, in_place = receive_state(communicator, 0, lambda key: own)
            assert in_place == {"x"} and trees["x"]["n"] == 7
            assert torch.equal(own["large"].cpu(), large) and own["small"].tolist() == [1.0] * 3  # type: ignore[attr-defined]
        return [*summed.tolist(), *root.tolist(), *gathered.tolist()]

    for found in on_ranks(2, work, gpu=0 if device.type == "cuda" else None):
        assert found == [3.0] * 4 + [1.0] * 2 + [1.0, 1.0, 2.0, 2.0], found
