"""``elastic-ray doctor`` on a machine with a GPU."""

from __future__ import annotations

import json

import torch
from click.testing import CliRunner

from elastic_ray.cli.doctor import doctor


def test_doctor_names_the_gpu(device: torch.device) -> None:
    answer = CliRunner().invoke(doctor, ["--json"])
    found = {check["name"]: check for check in json.loads(answer.stdout)}
    if device.type == "cuda":
        assert found["GPU"]["state"] == "ok" and torch.cuda.get_device_name(0) in found["GPU"]["detail"]
        assert found["NCCL"]["state"] == "ok" and "is right" in found["NCCL"]["detail"]
    else:
        assert found["GPU"]["detail"] and found["NCCL"]["detail"]
