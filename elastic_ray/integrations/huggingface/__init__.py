"""Hugging Face integration: ``transformers.Trainer``, and an ``Accelerator`` for custom loops."""

from __future__ import annotations

from elastic_ray.integrations.huggingface.accelerator import Accelerator
from elastic_ray.integrations.huggingface.trainer import ElasticTrainerMixin, Trainer

__all__ = ["Accelerator", "ElasticTrainerMixin", "Trainer"]
