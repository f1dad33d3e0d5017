"""What a rank writes of optimizer state in tiles into a checkpoint of all ranks (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from elastic_ray.state.pieces import Pieces
from elastic_ray.sync.optimizer_tiles.states import HeldTiles, State
from elastic_ray.sync.optimizer_tiles.tiling import Span, Tiling


def writers(tiling: Tiling, owners: Sequence[Sequence[int]]) -> list[int]:
    """Which of its owners writes each tile: about as many elements for each rank; the same on every rank."""
    load: dict[int, int] = {}
    found = [0] * len(tiling)
    for tile in sorted(range(len(tiling)), key=lambda tile: (-tiling.elements(tile), tile)):
        writer = min(owners[tile], key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + tiling.elements(tile)
        found[tile] = writer
    return found


def written_states(
    held: HeldTiles, params: Mapping[str, Parameter], owners: Sequence[Sequence[int]], rank: int
) -> dict[Parameter, State]:
    """States by parameter, with `Pieces` for what this rank writes of tensors of the parameter's shape.

    What else an optimizer keeps of a parameter, such as a count of steps, is written with its first elements. A rank
    that writes others names it as well, so that the names keep their order.

    Args:
        held: the tiles that this rank holds.
        params: by name.
        owners: ranks that own each tile.
        rank: of this worker.
    """
    found: dict[Parameter, State] = {}
    for tile, writer in enumerate(writers(held.tiling, owners)):
        if writer != rank:
            continue
        for span, state in zip(held.tiling.tiles[tile], held.states_of(tile), strict=True):
            _add(found.setdefault(params[span.name], {}), params[span.name], span, state)
    return found


def _add(found: State, param: Tensor, span: Span, state: Mapping[str, Any]) -> None:
    """Add the state of a span to that of its parameter."""
    for key, value in state.items():
        if isinstance(value, Tensor) and (span.whole or value.shape == (span.length,)):
            shape = tuple(value.shape) if span.whole else tuple(param.shape)
            before = found[key].held if key in found else ()
            found[key] = Pieces(shape, value.dtype, (*before, (span.start, value.detach())))
        elif isinstance(value, Tensor):
            held = ((0, value.detach()),) if span.start == 0 else ()
            if held or key not in found:
                found[key] = Pieces(tuple(value.shape), value.dtype, held)
        else:
            found[key] = value
