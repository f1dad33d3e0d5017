"""Options and arguments that several commands have."""

from __future__ import annotations

import click

from elastic_ray.driver.overrides import parse_workers

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, with all there is.")
job_argument = click.argument("job")


def read_workers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """``4`` or ``1:8``, as (min, max); a usage error if it is neither."""
    try:
        return None if value is None else parse_workers(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def read_size(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """A number of workers; None for ``auto``."""
    if value == "auto":
        return None
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise click.BadParameter(
            f"must be a number of workers from 1, or auto to leave it to the allocator, but got {value!r}", ctx, param
        )
    return int(value)
