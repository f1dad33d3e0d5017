"""The specification of a job, for tests that start none."""

from __future__ import annotations

from typing import Any

from elastic_ray.config import ElasticConfig
from elastic_ray.job_spec import JobSpec


def spec(**fields: Any) -> JobSpec:
    return JobSpec(
        **{
            "job": "j",
            "train_loop": b"",
            "min_workers": 1,
            "max_workers": 8,
            "bundle": {"CPU": 1.0},
            "use_gpu": False,
            "label_selector": {},
            "storage_path": "/tmp/x",
            "storage_filesystem": None,
            "max_failures": 0,
            "num_to_keep": None,
            "checkpoint_score_attribute": None,
            "checkpoint_score_order": "max",
            "runtime_env": {},
            "elastic": ElasticConfig(),
            **fields,
        }
    )
