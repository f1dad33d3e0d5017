"""Hugging Face under elastic-ray: ``transformers.Trainer``, and an ``Accelerator`` for loops of your own."""

from __future__ import annotations

from elastic_ray.integrations.huggingface.accelerator import Accelerator
from elastic_ray.integrations.huggingface.trainer import ElasticTrainerMixin, Trainer

__all__ = ["Accelerator", "ElasticTrainerMixin", "Trainer"]
