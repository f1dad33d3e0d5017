"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Any

import click

from elastic_ray.overrides import parse_workers

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, with all there is.")
job_argument = click.argument("job")


class Workers(click.ParamType):
    """``4`` or ``1:8``."""

    name = "MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """(min, max); a usage error if it is neither."""
        if isinstance(value, tuple):
            return value
        try:
            return parse_workers(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Size(click.ParamType):
    """A number of workers, or ``auto``."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """None for ``auto``."""
        if value is None or isinstance(value, int):
            return value
        if value == "auto":
            return None
        if not str(value).isdigit() or int(value) < 1:
            self.fail(
                f"must be a number of workers from 1, or auto to leave it to the allocator, but got {value!r}",
                param,
                ctx,
            )
        return int(value)
