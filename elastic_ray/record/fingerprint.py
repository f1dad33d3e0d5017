"""Fingerprint of the model that a job trains, which lets jobs share measurements (pure).

Two jobs have equal fingerprints if their steps should take equal time on the same nodes at the same batch. A
fingerprint includes:

- the user's name for the model, ``ElasticTrainer(model_fingerprint="resnet18-224")``. Without a name, the following for
  every wrapped model: its class, the names, shapes, types and ``requires_grad`` of its parameters, the class of its
  optimizer, whether AMP scales its loss, and its synchronisation strategy if that is not all-reduce. In addition, the
  class of the training loader's dataset and, if it holds tensors, their shapes and types;
- the resources of one worker.

A fingerprint excludes: learning rates, seeds, batch sizes (part of each measurement), numbers of workers, GPU types
(measurements are kept by type), and how the forward pass uses the parameters. Jobs that differ only in the forward pass
(a stride, a resolution that the dataset does not show) and not in class names need different user names.
"""

from __future__ import annotations

import hashlib

from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.job_spec import JobSpec
from placement.text import describe


def fingerprint(spec: JobSpec, loader: LoaderInfo | None) -> str | None:
    """Return the job's fingerprint, such as ``Net-1f0c9a2b7d3e on 1 CPU``; None while its model is unknown."""
    name = spec.model_fingerprint
    if name is None:
        if loader is None or not loader.models:
            return None
        kinds = "+".join(dict.fromkeys(model.kind for model in loader.models))
        text = "\n".join([*(model.details for model in loader.models), loader.sample])
        name = f"{kinds}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return f"{name} on {describe(spec.bundle)}"
