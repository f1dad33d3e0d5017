"""Replaceable table of on-demand and spot prices, by GPU type and by instance type."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from placement.checks import check_number, check_whole
from placement.errors import InputError, reading
from placement.unique_keys import load_json

COLUMNS = ("type", "on_demand", "spot")
"""Columns that a price file must have; ``gpu`` and ``gpus`` (see ``Price``) may follow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Hourly on-demand and spot price of one GPU, or of a whole instance [USD/h]."""

    on_demand: float  # of one that stays
    spot: float  # of one that may be taken away
    gpu: str = ""  # type of its GPUs, as Ray's label ``ray.io/accelerator-type`` has it; empty for one without
    gpus: int = 1  # how many it has

    def __post_init__(self) -> None:
        for field in ("on_demand", "spot"):
            check_number(field, getattr(self, field), least=0, unit="USD per hour", finite=True, error=InputError)
        check_whole("gpus", self.gpus, error=InputError)

    def usd_per_h(self, *, spot: bool) -> float:
        """Return the on-demand or spot price [USD/h]."""
        return self.spot if spot else self.on_demand


def _defaults() -> dict[str, Price]:
    """Return rounded prices [USD/h]: of one GPU by GPU type, of the whole machine by instance type."""
    cards = {
        ("aws", "t4"): Price(on_demand=0.98, spot=0.35),
        ("rtx",): Price(on_demand=0.50, spot=0.20),
        ("quad",): Price(on_demand=1.25, spot=0.50),
        ("azure", "v100"): Price(on_demand=3.06, spot=1.00),
        ("dgx", "dgx-ext", "a100"): Price(on_demand=4.10, spot=1.60),
    }
    instances = {
        "g4dn.xlarge": Price(on_demand=0.53, spot=0.19, gpu="T4", gpus=1),
        "g4dn.2xlarge": Price(on_demand=0.75, spot=0.27, gpu="T4", gpus=1),
        "g4dn.12xlarge": Price(on_demand=3.92, spot=1.40, gpu="T4", gpus=4),
        "g5.xlarge": Price(on_demand=1.01, spot=0.40, gpu="A10G", gpus=1),
        "g5.12xlarge": Price(on_demand=5.67, spot=2.30, gpu="A10G", gpus=4),
        "p3.2xlarge": Price(on_demand=3.06, spot=1.00, gpu="V100", gpus=1),
        "p3.8xlarge": Price(on_demand=12.24, spot=4.00, gpu="V100", gpus=4),
        "p3.16xlarge": Price(on_demand=24.48, spot=8.00, gpu="V100", gpus=8),
        "p4d.24xlarge": Price(on_demand=32.80, spot=12.80, gpu="A100", gpus=8),
        "m5.xlarge": Price(on_demand=0.19, spot=0.08, gpus=0),
        "m5.2xlarge": Price(on_demand=0.38, spot=0.16, gpus=0),
        "g2-standard-4": Price(on_demand=0.71, spot=0.28, gpu="L4", gpus=1),
        "g2-standard-48": Price(on_demand=4.00, spot=1.60, gpu="L4", gpus=4),
        "a2-highgpu-1g": Price(on_demand=3.67, spot=1.47, gpu="A100", gpus=1),
        "n2-standard-4": Price(on_demand=0.19, spot=0.06, gpus=0),
    }
    return {name: price for names, price in cards.items() for name in names} | instances


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices keyed by GPU type and by instance type.

    The built-in prices are rounded and approximate; replace them if accuracy matters. On-demand prices are close to the
    list prices of clouds that rent the GPU (g4dn.12xlarge / 4, p4d.24xlarge / 8, p3.16xlarge / 8; 0.50 and 1.25 for
    GPUs that no cloud rents). Spot prices are 33 to 40 % of these.
    """

    source: str = "the default table"  # the file, for errors
    prices: Mapping[str, Price] = dataclasses.field(default_factory=_defaults)  # by GPU type, and by instance type

    def rates(self, types: Collection[str], spot: Collection[str] = ()) -> dict[str, float]:
        """Return the price per GPU [USD/h], keyed by GPU type: the spot price for types in ``spot``, else on-demand."""
        missing = sorted(set(types) - set(self.prices))
        if missing:
            raise InputError(
                f"prices must name every GPU type of the cluster, but {self.source} lacks {', '.join(missing)}; "
                f"it has {', '.join(sorted(self.prices))}"
            )
        bare = sorted(t for t in types if self.prices[t].gpus < 1)
        if bare:
            raise InputError(f"prices of GPU types must be of rows with GPUs, but {self.source} has none on {bare[0]}")
        return {t: self.prices[t].usd_per_h(spot=t in spot) / self.prices[t].gpus for t in sorted(types)}

    def instance(self, name: str) -> Price:
        """Return the on-demand and the spot price of an instance type."""
        if name not in self.prices:
            raise InputError(
                f"instance type {name!r} is unknown: {self.source} has {', '.join(sorted(self.prices))}; "
                f"add a row with {', '.join(COLUMNS)}, gpu, gpus to a price file of your own"
            )
        return self.prices[name]


def read_prices(path: str | Path) -> PriceTable:
    """Read a price table from a CSV file, or a JSON list of objects, that has the columns listed in ``COLUMNS``."""
    with reading(f"prices {path}", ValueError):
        text = Path(path).read_text(encoding="utf-8")
        rows: Any = load_json(text) if Path(path).suffix == ".json" else list(csv.DictReader(text.splitlines()))
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"prices {path} must hold rows with {', '.join(COLUMNS)}, but has none")
    return PriceTable(source=str(path), prices=_prices(rows, str(path)))


def _prices(rows: Iterable[Mapping[str, Any]], source: str) -> dict[str, Price]:
    """Return prices by type."""
    prices: dict[str, Price] = {}
    for number, row in enumerate(rows, start=1):
        where = f"prices {source}, row {number}"
        missing = [column for column in COLUMNS if row.get(column) in (None, "")]
        if missing:
            raise InputError(f"{where} must have {', '.join(COLUMNS)}, but {', '.join(missing)} is missing")
        name = str(row["type"]).strip()
        if name in prices:
            raise InputError(f"{where}: every type must occur once, but {name!r} occurs more than once")
        try:
            prices[name] = Price(
                on_demand=float(row["on_demand"]),
                spot=float(row["spot"]),
                gpu=str(row.get("gpu") or "").strip(),
                gpus=1 if row.get("gpus") in (None, "") else int(row["gpus"]),
            )
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: {error}") from error
    return prices
