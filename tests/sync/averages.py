"""An average of each kind."""

from __future__ import annotations

from elastic_ray.sync.spec import Average

AVERAGES = {
    "local_sgd": Average(algorithm="local_sgd", period=3),
    "diloco": Average(algorithm="diloco", period=2, outer_lr=0.7, outer_momentum=0.9),
    "sma": Average(algorithm="sma", period=1, alpha=0.3),
    "pair": Average(algorithm="pair", period=1),
}
