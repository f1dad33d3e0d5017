"""A DataLoader's worker process tells the training process of a batch that it cannot send."""

from __future__ import annotations

import multiprocessing.queues
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info


def tell_errors() -> None:
    """In a DataLoader's worker process: send the error in place of a batch that cannot be sent.

    Python pickles a batch in a thread of the worker process, whose errors it prints and forgets, and the training
    process would wait for the batch for ever.
    """
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]


def _send_error(queue: Any, error: Exception, what: Any) -> None:
    """Python's ``Queue._on_queue_feeder_error``, in the thread that sends; ``what`` is ``(number, batch)``."""
    worker = get_worker_info()
    if not isinstance(what, tuple) or worker is None:
        raise error
    told = RuntimeError(
        "a dataset and a collate_fn must return what can be pickled where num_workers > 0, but a batch cannot be sent "
        f"to the training process: {type(error).__name__}: {error}. Define its classes at the top level of a module "
        "or of the script, or use num_workers=0"
    )
    where = f"in DataLoader worker process {worker.id}"
    wrapped: Any = ExceptionWrapper
    queue.put((what[0], wrapped((RuntimeError, told, error.__traceback__), where)))
