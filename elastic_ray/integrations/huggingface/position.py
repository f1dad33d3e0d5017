"""The place in the data beside a checkpoint of Hugging Face's, in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic_ray.loop.api import current_session

_FILE = "elastic_ray_position.json"


def write_position(folder: Path) -> None:
    """Put the present place into a checkpoint's folder, as a whole or not at all."""
    part = folder / f"{_FILE}.part"
    part.write_text(json.dumps(current_session().resume_point().to_json()))
    part.replace(folder / _FILE)


def read_position(folder: Path) -> Any | None:
    """The place of a checkpoint; None where it has none, being of another program.

    Raises:
        ValueError: the file is damaged.
    """
    file = folder / _FILE
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged, so that it is not known where the checkpoint stands in the data: {error}. Take "
            "another checkpoint; or delete the file, and the epoch begins anew"
        ) from error
