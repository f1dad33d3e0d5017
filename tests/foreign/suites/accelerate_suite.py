"""A pytest plugin: the tests of accelerate see elastic-ray's ``Accelerator`` under accelerate's name."""

from __future__ import annotations

import accelerate
import accelerate.accelerator

from elastic_ray.integrations.huggingface import Accelerator

accelerate.Accelerator = Accelerator
accelerate.accelerator.Accelerator = Accelerator
