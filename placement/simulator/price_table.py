"""What a GPU costs: a replaceable table of on-demand and spot prices."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from placement.simulator.errors import InputError

COLUMNS = ("type", "on_demand", "spot")
"""Columns of a price file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD per GPU and hour.

    Attributes:
        on_demand: of a GPU that stays.
        spot: of one that may be taken away.
    """

    on_demand: float
    spot: float

    def __post_init__(self) -> None:
        for field in ("on_demand", "spot"):
            value = getattr(self, field)
            if not (value >= 0 and math.isfinite(value)):
                raise InputError(f"{field} must be 0 USD per GPU-hour or more, but got {value}")


def _defaults() -> dict[str, Price]:
    cards = {
        ("aws", "t4"): Price(on_demand=0.98, spot=0.35),
        ("rtx",): Price(on_demand=0.50, spot=0.20),
        ("quad",): Price(on_demand=1.25, spot=0.50),
        ("azure", "v100"): Price(on_demand=3.06, spot=1.00),
        ("dgx", "dgx-ext", "a100"): Price(on_demand=4.10, spot=1.60),
    }
    return {name: price for names, price in cards.items() for name in names}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices by GPU type.

    The default ones are rounded and from memory, to be replaced by whoever counts money: on demand near the list
    prices of clouds that rent the card (g4dn.12xlarge / 4, p4d.24xlarge / 8, p3.16xlarge / 8; 0.50 and 1.25 stand for
    cards without one), spot at a third to two fifths of that.

    Attributes:
        source: the file, for errors.
        prices: by GPU type.
    """

    source: str = "the default table"
    prices: Mapping[str, Price] = dataclasses.field(default_factory=_defaults)

    def rates(self, types: Collection[str], spot: Collection[str] = ()) -> dict[str, float]:
        """USD per GPU and hour of each type, those in ``spot`` at their spot price.

        Raises:
            InputError: a type is not in the table.
        """
        missing = sorted(set(types) - set(self.prices))
        if missing:
            raise InputError(
                f"prices must name every GPU type of the cluster, but {self.source} lacks {', '.join(missing)}; "
                f"it has {', '.join(sorted(self.prices))}"
            )
        return {t: self.prices[t].spot if t in spot else self.prices[t].on_demand for t in sorted(types)}


def read_prices(path: str | Path) -> PriceTable:
    """Read a table: a CSV file, or a JSON list of objects, with the columns of ``COLUMNS``.

    Raises:
        InputError: the file cannot be read, lacks a column, repeats a type or holds no price; names the file and row.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        rows: Any = json.loads(text) if Path(path).suffix == ".json" else list(csv.DictReader(text.splitlines()))
    except (OSError, ValueError) as error:
        raise InputError(f"prices {path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"prices {path} must hold rows with {', '.join(COLUMNS)}, but has none")
    return PriceTable(source=str(path), prices=_prices(rows, str(path)))


def _prices(rows: Iterable[Mapping[str, Any]], source: str) -> dict[str, Price]:
    prices: dict[str, Price] = {}
    for number, row in enumerate(rows, start=1):
        where = f"prices {source}, row {number}"
        missing = [column for column in COLUMNS if row.get(column) in (None, "")]
        if missing:
            raise InputError(f"{where} must have {', '.join(COLUMNS)}, but {', '.join(missing)} is missing")
        gpu = str(row["type"]).strip()
        if gpu in prices:
            raise InputError(f"{where}: every type must occur once, but {gpu!r} occurs more than once")
        try:
            prices[gpu] = Price(on_demand=float(row["on_demand"]), spot=float(row["spot"]))
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: {error}") from error
    return prices
