"""Module ``ShardedEmbedding``: an embedding table with rows divided among the workers (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from elastic_ray.sync.checks import check_count, check_one_of
from elastic_ray.sync.sharded.placement import RowTiling
from elastic_ray.sync.sharded.rules import RowRule, named_rule
from elastic_ray.sync.sharded.shard import TableShard
from elastic_ray.sync.sharded.store import LoadedRows, SeededRows
from elastic_ray.sync.sharded.table import ShardedTable, TableShape

_MOST = 1 << 40
_UNSERVED = {
    "max_norm": "rows are not shortened when they are looked up: normalise them in the model",
    "norm_type": "it belongs to max_norm, which is not supported",
    "scale_grad_by_freq": "gradients are added up over all ranks before they are applied, without counting lookups",
    "sparse": "gradients are always those of touched rows; leave it out",
}


class ShardedEmbedding(torch.nn.Module):
    """Embedding layer with rows divided among the workers, for tables too large for a single worker.

    Use it like ``torch.nn.Embedding`` or ``EmbeddingBag``. The forward pass fetches rows from their owners. Row
    gradients are averaged over the step's samples and sent to the owners, which update the rows in
    ``optimizer.step()``. The rows are not parameters: pass ``model.parameters()`` to the optimizer as usual;
    ``AdaptiveDataParallel`` finds the tables in the model. In a group with one worker, the module is an ordinary table.

    All ranks must call the module the same number of times and in the same order. ``state_dict()`` must be called on
    all ranks in a group; it contains the complete ``weight`` on rank 0 and a ``weight`` without rows on other ranks.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Width of a row.
        padding_idx: Row that is initialised to zero and gets no gradient; None for no such row.
        mode: Reduction of bags, ``"sum"`` or ``"mean"``, as in ``EmbeddingBag``; None to return the rows themselves.
        optimizer: Update rule for rows: ``RowSGD``, ``RowAdagrad``, ``RowAdam``, or ``"sgd"``, ``"adagrad"``,
            ``"adam"``. None uses the rule of the wrapped optimizer, which must be SGD without momentum, Adagrad or
            SparseAdam, without decays. The learning rate is derived from the wrapped optimizer's learning rate.
        copies: Number of workers that own each row, 1 or 2. With 2, losing a single worker loses no rows; the owners
            are on different nodes if the load can be balanced that way. With 1, the job restarts from its last
            checkpoint if a worker is lost.
        std: Standard deviation of the normal distribution used to initialise rows.
        seed: Seed for the initial rows. None draws a seed from torch's generator; all ranks use rank 0's seed.
        dtype: Floating-point dtype of the rows.
        device: Device of the rows. Results are on the same device as the ids.

    Attributes:
        travels_by_itself: Marks that rows are transferred as a separate state, and that all ranks must call
            ``state_dict()``.

    Raises:
        StrategyError: a size or ``copies`` is out of range.
        ValueError: another argument is out of range.
        TypeError: ``optimizer`` is not an update rule, or an option is not supported.

    Examples:
        >>> from elastic_ray.sync import ShardedEmbedding
        >>> table = ShardedEmbedding(1000, 16, optimizer="adagrad")
        >>> table.embedding_dim
        16
    """

    travels_by_itself: ClassVar[bool] = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mode: str | None = None,
        optimizer: RowRule | str | None = None,
        copies: int = 2,
        std: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        super().__init__()
        _refuse(options)
        check_count("num_embeddings", num_embeddings, least=1, most=_MOST)
        check_count("embedding_dim", embedding_dim, least=1, most=_MOST)
        check_count("copies", copies, least=1, most=2)
        if mode is not None:
            check_one_of("mode", mode, ("sum", "mean"))
        if not std >= 0.0:
            raise ValueError(f"std must be 0 or more, but got {std}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating, but got {dtype}")
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.rule = named_rule(optimizer)
        self._seed = int(torch.randint(1 << 31, ())) if seed is None else seed
        self._shape = TableShape(
            rows=num_embeddings,
            width=embedding_dim,
            copies=copies,
            std=std,
            padding=self.padding_idx,
            dtype=dtype,
            device=torch.device(device),
        )
        self._table: ShardedTable | None = None
        self._loaded: dict[str, Tensor] | None = None
        self._alone: TableShard | None = None

    def join(self, rule: RowRule, name: str, number: tuple[int, int], run: Any) -> ShardedTable:
        """Create the table for training in a run; called from ``AdaptiveDataParallel``.

        Args:
            rule: Update rule for rows.
            name: Name of the module in its model.
            number: Model index in the run, and table index in the model.

        Raises:
            ValueError: the table already belongs to a model in the run.
            RuntimeError: the table's rows are divided among another run's workers.
        """
        if self._table is not None:
            self._loaded = self._table.left_for(run)
        table = ShardedTable(self._shape, rule, self._seed, name, number, run)
        if self._loaded is not None:
            table.load(self._loaded)
        self._table, self._loaded, self._alone = table, None, None
        return table

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return rows, or reduced bags of rows, like ``torch.nn.Embedding`` and ``EmbeddingBag``.

        Args:
            input: Ids of rows, of any shape. With a ``mode``, [bags, ids], or [ids] if ``offsets`` are given.
            offsets: Start of each bag in a flat ``input``; only with a ``mode``.
            per_sample_weights: Weights of the ids; only with mode ``"sum"``.

        Raises:
            IndexError: an id is negative, or not below ``num_embeddings``.
            RanksDisagreeError: not all ranks call the module at the same point.
            RuntimeError: rows cannot be fetched at this point; the message says why.
        """
        ids, where = torch.unique(input.reshape(-1), return_inverse=True)
        if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < self.num_embeddings):
            raise IndexError(
                f"ids must be from 0 to below num_embeddings={self.num_embeddings}, but are from {int(ids[0])} to "
                f"{int(ids[-1])}"
            )
        rows = self._rows(ids.to(self._shape.device, torch.int64)).to(input.device)
        padding = self._place_of_padding(ids)
        where = where.view(input.shape)
        if self.mode is None:
            return functional.embedding(where, rows, padding_idx=padding)
        return functional.embedding_bag(
            where, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights, padding_idx=padding
        )

    def _rows(self, ids: Tensor) -> Tensor:
        """Return rows as a leaf of autograd's graph, with its gradient passed to the table."""
        table, grad = self._table, torch.is_grad_enabled()
        if table is None:
            if grad and self.training:
                raise RuntimeError(
                    "a ShardedEmbedding is trained in a model that is wrapped: "
                    "model = elastic_ray.AdaptiveDataParallel(model, optimizer); to evaluate it, use torch.no_grad()"
                )
            return self._whole_alone().read(ids)
        rows = table.rows(ids)
        if grad:
            rows.requires_grad_()

            def give(leaf: Tensor) -> None:
                gradient, leaf.grad = leaf.grad, None
                if gradient is not None:
                    table.add_gradient(ids, gradient)

            rows.register_post_accumulate_grad_hook(give)  # type: ignore[no-untyped-call]
        return rows

    def _whole_alone(self) -> TableShard:
        """Return a shard with all rows, for use outside any run."""
        if self._alone is None:
            shape, tiling = self._shape, RowTiling.of(self.num_embeddings)
            empty = torch.empty(0, shape.width, dtype=shape.dtype, device=shape.device)
            shard = self._alone = TableShard(tiling, 1, {"weight": empty}, "")
            loaded = self._loaded
            shard.start(
                SeededRows(tiling, self._seed, shape.std, shape.padding, {})
                if loaded is None
                else LoadedRows(tiling, loaded, {})
            )
            shard.make_whole()
        return self._alone

    def _place_of_padding(self, ids: Tensor) -> int | None:
        """Return the position of the padding row in `ids`; None if it is absent."""
        if self.padding_idx is None:
            return None
        place = int(torch.searchsorted(ids, self.padding_idx))
        return place if place < len(ids) and int(ids[place]) == self.padding_idx else None

    def row_state_dict(self) -> dict[str, Any]:
        """Return the complete table, including its update rule's state and number of updates; called on every rank.

        Returns:
            ``weight`` and the rule's state under torch's names (``sum``; ``exp_avg``, ``exp_avg_sq``), each
            [num_embeddings, embedding_dim] on rank 0 and without rows on other ranks; and ``step``, the number of
            updates.

        Raises:
            RuntimeError: the model is not wrapped.
        """
        table = self._wrapped()
        return {**table.whole(("weight", *table.rule.initial)), "step": table.updates}

    def load_row_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load rank 0's result of :meth:`row_state_dict`, from a group of any size; all ranks must load the same state.

        Raises:
            RuntimeError: the model is not wrapped.
            ValueError: the state is for a table with a different shape.
        """
        table = self._wrapped()
        whole = {name: state[name] for name in ("weight", *table.rule.initial) if name in state}
        for name, tensor in whole.items():
            self._check_shape(name, tensor)
        table.load(whole, int(state.get("step", 0)))

    def _wrapped(self) -> ShardedTable:
        if self._table is None:
            raise RuntimeError("rows have state once the model is wrapped: AdaptiveDataParallel(model, optimizer)")
        return self._table

    def _check_shape(self, name: str, tensor: Tensor) -> None:
        wanted = (self.num_embeddings, self.embedding_dim)
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} must have shape {wanted}, but got {tuple(tensor.shape)}")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the complete weight, as torch requires."""
        found = self._table.whole() if self._table is not None else self._whole_alone().whole(None, ("weight",))
        assert found is not None
        destination[prefix + "weight"] = found["weight"]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a complete weight, with each rank keeping its own part; the rule's state is reset."""
        key = prefix + "weight"
        if key not in state_dict:
            missing_keys.append(key)
            return
        try:
            self._check_shape(key, state_dict[key])
        except ValueError as error:
            error_msgs.append(str(error))
            return
        whole = {"weight": state_dict[key].detach()}
        if self._table is not None:
            self._table.load(whole)
        else:
            self._loaded, self._alone = whole, None

    def extra_repr(self) -> str:
        """Return the same description as ``torch.nn.Embedding``, plus the mode and the number of copies."""
        mode = f", mode={self.mode!r}" if self.mode is not None else ""
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{mode}, copies={self._shape.copies}"


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise TypeError for unsupported arguments unless their value disables them."""
    for name, value in options.items():
        if name not in _UNSERVED:
            raise TypeError(f"ShardedEmbedding has no argument {name!r}")
        if value not in (None, False) and not (name == "norm_type" and value == 2.0) and name != "sparse":
            raise TypeError(f"{name}={value!r} is not supported by ShardedEmbedding: {_UNSERVED[name]}")


def _padding(padding_idx: int | None, rows: int) -> int | None:
    """Return the padding row counted from 0; raise ValueError if it is out of range."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx must be within num_embeddings={rows}, but got {padding_idx}")
    return padding_idx % rows
