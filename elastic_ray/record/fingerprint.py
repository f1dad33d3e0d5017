"""Fingerprint of jobs that train the same model, so that measurements of one hold for all (pure).

Two jobs have the same fingerprint if their steps should take the same time on the same nodes at the same batch:

- the name that the user gave, ``ElasticTrainer(model_fingerprint="resnet18-224")``; else, of every wrapped model, its
  class, the names, shapes, types and ``requires_grad`` of its parameters, the class of its optimizer, whether AMP
  scales its loss, and the strategy of its synchronisation where that is not all-reduce; and the class of the training
  loader's dataset and, where it holds tensors, their shapes and types;
- the resources of one worker.

Not in it: learning rates, seeds, batch sizes (measurements name theirs), numbers of workers, GPU types (measurements
are kept by type), and what the forward pass does with the parameters: jobs that differ only there (a stride, a
resolution that the dataset does not show) and not in the classes' names are to be given names.
"""

from __future__ import annotations

import hashlib

from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.job_spec import JobSpec
from placement.policies.shared.base import describe


def fingerprint(spec: JobSpec, loader: LoaderInfo | None) -> str | None:
    """The job's fingerprint, for people ``Net-1f0c9a2b7d3e on 1 CPU``; None while nothing is known of its model."""
    name = spec.model_fingerprint
    if name is None:
        if loader is None or not loader.models:
            return None
        kinds = "+".join(dict.fromkeys(model.kind for model in loader.models))
        text = "\n".join([*(model.details for model in loader.models), loader.sample])
        name = f"{kinds}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return f"{name} on {describe(spec.bundle)}"
