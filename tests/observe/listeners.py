"""Callbacks that write down what they are told, for the tests beside it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ray.train import UserCallback
from ray.tune.logger import LoggerCallback


class Listener(UserCallback):
    """Writes lines into a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def _write(self, **line: Any) -> None:
        with open(self.path, "a") as stream:
            stream.write(json.dumps(line) + "\n")

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        name = run_context.get_run_config().name
        path = None if checkpoint is None else checkpoint.path
        self._write(kind="report", run=run_context.run_id, name=name, metrics=metrics, checkpoint=path)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._write(kind="exception", errors={rank: str(error) for rank, error in worker_exceptions.items()})

    def on_resize(self, run_context: Any, event: Any) -> None:
        self._write(kind="resize", before=event.from_workers, after=event.to_workers, reason=event.reason)


class Raises(UserCallback):
    """Raises whenever it is asked."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        raise SystemExit("no more")


class Hangs(UserCallback):
    """Never returns."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        while True:
            time.sleep(1.0)


class Logger(LoggerCallback):
    """Writes down a trial's life; its count of results goes along with its state."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = str(path), 0

    def _write(self, *line: Any) -> None:
        with open(self.path, "a") as stream:
            stream.write(json.dumps(line) + "\n")

    def setup(self, *args: Any, **info: Any) -> None:
        self._write("setup", self.count)

    def get_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def log_trial_start(self, trial: Any) -> None:
        self._write("start", str(trial), trial.trial_id, trial.config["epochs"])

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self.count += 1
        self._write("result", iteration, self.count, result["training_iteration"], result["elastic"]["workers"])

    def log_trial_save(self, trial: Any) -> None:
        self._write("save", trial.checkpoint.path)

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self._write("end", failed)


def lines(path: Path) -> list[Any]:
    """What was written."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
