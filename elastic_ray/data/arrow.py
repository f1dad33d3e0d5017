"""Parquet files of any size as a map-style dataset, on local disk or any store that pyarrow or fsspec supports."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

from elastic_ray.data import sharding
from elastic_ray.data.sharding import Indices, Permutation, positions

Row = dict[str, Any]
Source = str | os.PathLike[str]
Value = TypeVar("Value")

_PARQUET = pa.dataset.ParquetFileFormat()
_FOOTER_THREADS = 8  # reading a footer is one or two small requests: latency, not work
_FILES_OPEN = 64  # footers kept per process, some kB to MB each


class ArrowDataset:
    """Rows of Parquet files as a map-style dataset, numbered file by file and read one row group at a time.

    Construction reads only the files' footers. Rows are read through a cache of row groups, which evicts the least
    recently used group. Each reading process (the training process, or each DataLoader worker) holds at most twice
    `buffer_row_groups` row groups of the chosen columns. Neither the cache nor open handles survive pickling or a fork
    into DataLoader workers.

    A row is a dict of values keyed by column: NumPy scalars for numbers and booleans; NumPy arrays for lists of numbers
    or booleans (of fixed or varying length) and for fixed-shape tensors; Python values for all other types (strings,
    bytes, timestamps, structs); None for null. Torch's default collate function accepts the NumPy types.

    When the loader shuffles, row groups are used in random order, `buffer_row_groups` at a time, and the rows of these
    row groups are shuffled together. The larger the buffer, the closer the order is to a full shuffle.

    Attributes:
        locality: tells the loader to sort a step's indices before dividing them between the ranks, so that each rank
            reads only some of the row groups. The global batch contains the same samples, but each rank's share is from
            the same few row groups. If rows differ systematically between groups (a file sorted by label), shuffle them
            once when writing the files.

    Examples:
        >>> import tempfile, pyarrow as pa, pyarrow.parquet as pq
        >>> from elastic_ray.data.arrow import ArrowDataset
        >>> file = tempfile.mkdtemp() + "/rows.parquet"
        >>> pq.write_table(pa.table({"x": [1, 2, 3]}), file)
        >>> dataset = ArrowDataset(file)
        >>> len(dataset), int(dataset[2]["x"])
        (3, 3)
    """

    locality = True

    def __init__(
        self,
        source: Source | Sequence[Source],
        *,
        columns: Sequence[str] | None = None,
        filesystem: Any = None,
        buffer_row_groups: int = 4,
        transform: Callable[[Row], Any] | None = None,
    ) -> None:
        """Read all files' footers.

        Args:
            source: a Parquet file, a directory, a list of either, or URIs such as s3://bucket/data; paths on
                `filesystem` if given. A directory means all *.parquet and *.pq files below it; a single directory may
                have key=value folders, which become columns.
            columns: columns to read; all by default.
            filesystem: a `pyarrow.fs.FileSystem` or an fsspec file system; derived from `source` by default.
            buffer_row_groups: number of row groups whose rows are shuffled together, >= 1.
            transform: function applied to each row; None returns rows unchanged.

        Raises:
            FileNotFoundError: a path does not exist, or a directory holds no Parquet file.
            ValueError: the files have no rows, a column or URI scheme is unknown, a file is not Parquet, or a size is
                out of range.
        """
        if buffer_row_groups < 1:
            raise ValueError(f"buffer_row_groups must be at least 1, but got {buffer_row_groups}")
        self._filesystem, paths, base = _find(source, filesystem)
        try:
            found = pa.dataset.dataset(
                paths,
                format=_PARQUET,
                filesystem=self._filesystem,
                partitioning="hive" if base else None,
                partition_base_dir=base,
            )
        except pa.ArrowInvalid as error:
            raise ValueError(f"every file must be Parquet: {error}") from error
        self._schema = found.schema
        self._columns = _check_columns(columns, found.schema.names)
        fragments = list(found.get_fragments())
        self._files = [(fragment.path, fragment.partition_expression) for fragment in fragments]
        self._groups, self._starts = _row_groups(fragments)
        if len(self) == 0:
            raise ValueError(f"the dataset must have at least 1 row, but {_shown(paths)} have none")
        self._buffer_row_groups = buffer_row_groups
        self._transform = transform
        self._discard()

    def __len__(self) -> int:
        """Return the number of rows in all files."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        """Return the row at `index`, which must be in -len..len-1."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the rows at `indices`, in the given order; torch's DataLoader calls this once per batch."""
        wanted = np.asarray(indices, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"indices must be in 0..{len(self) - 1}, but got {min(indices)}..{max(indices)}")
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        rows: list[Any] = [None] * len(wanted)
        for group in np.unique(groups):
            places = np.flatnonzero(groups == group)
            table = self._table(int(group)).take(pa.array(wanted[places] - self._starts[group]))
            for place, row in zip(places, _rows(table), strict=True):
                rows[place] = row if self._transform is None else self._transform(row)
        return rows

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of a row's columns."""
        return self._columns

    @property
    def row_groups(self) -> int:
        """Number of non-empty row groups in all files."""
        return len(self._groups)

    def compared_files(self) -> list[tuple[str, int]]:
        """Return the path and first row number of each row group, to compare datasets without reading rows."""
        firsts = self._starts[:-1].tolist()
        return [(self._files[file][0], first) for (file, _), first in zip(self._groups, firsts, strict=True)]

    def epoch_order(self, seed: int, epoch: int) -> WindowedOrder:
        """Return an epoch's row order: row groups are shuffled, then the rows within each window of groups."""
        key = sharding.epoch_key(seed=seed, epoch=epoch)
        shuffled = Permutation(samples=len(self._groups), key=key)[:]
        count = -(-len(shuffled) // self._buffer_row_groups)
        # evenly: a last window of one group would not be mixed
        return WindowedOrder(self._starts, np.array_split(shuffled, count), key=key)

    def read_row_group(self, group: int) -> pa.Table:
        """Read row group number `group` (of `row_groups`) from its file, bypassing the cache."""
        file, number = self._groups[group]
        piece = _cached(self._fragments, file, self._open, _FILES_OPEN).subset(row_group_ids=[number])
        table = piece.to_table(schema=self._schema, columns=list(self._columns), use_threads=False)
        return table.combine_chunks()

    def _table(self, group: int) -> pa.Table:
        if self._process != os.getpid():
            # a forked child must not use its parent's connections and threads: open its own
            self._filesystem = pickle.loads(pickle.dumps(self._filesystem))
            self._discard()
        return _cached(self._tables, group, self.read_row_group, 2 * self._buffer_row_groups)

    def _open(self, file: int) -> Any:
        path, partition = self._files[file]
        return _PARQUET.make_fragment(path, filesystem=self._filesystem, partition_expression=partition)

    def _discard(self) -> None:
        self._process = os.getpid()
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._fragments: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_process", "_tables", "_fragments"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._discard()


class WindowedOrder:
    """Row order that is shuffled within windows of several row groups; computed on demand.

    Args:
        starts: first row number of each row group, followed by the total number of rows.
    """

    def __init__(self, starts: Indices, windows: Sequence[Indices], *, key: str) -> None:
        self._starts, self._windows, self._key = starts, windows, key
        rows = np.diff(starts)
        self._ends = np.cumsum([rows[groups].sum() for groups in windows])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, part: slice | Indices) -> Indices:
        """Return the row numbers at the given positions of the order."""
        wanted = positions(part, len(self))
        numbers = np.searchsorted(self._ends, wanted, side="right")
        rows = np.empty_like(wanted)
        for number in np.unique(numbers):
            groups, places = self._windows[number], np.flatnonzero(numbers == number)
            edges = np.concatenate([[0], np.cumsum(self._starts[groups + 1] - self._starts[groups])])
            mixed = Permutation(samples=int(edges[-1]), key=f"{self._key} window {number}")
            within = mixed[wanted[places] - (self._ends[number] - edges[-1])]
            chosen = np.searchsorted(edges, within, side="right") - 1
            rows[places] = self._starts[groups[chosen]] + within - edges[chosen]
        return rows


def _cached(cache: OrderedDict[int, Value], key: int, make: Callable[[int], Value], size: int) -> Value:
    if key in cache:
        cache.move_to_end(key)
        return cache[key]
    while len(cache) >= size:  # before reading, so that never more than `size` are in memory
        cache.popitem(last=False)
    cache[key] = made = make(key)
    return made


def _rows(table: pa.Table) -> list[Row]:
    columns = [_values(column.combine_chunks()) for column in table.columns]
    names = table.column_names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _values(column: Any) -> list[Any]:
    """Convert an Arrow array to one Python or NumPy value per row, column-wise where the type allows."""
    if isinstance(column, pa.ChunkedArray):  # an extension type, or more than 2 GB of strings
        return [value for chunk in column.chunks for value in _values(chunk)]
    kind = column.type
    if column.null_count:
        some = iter(_values(column.drop_null()))
        return [next(some) if valid else None for valid in column.is_valid().to_pylist()]
    if _is_plain(kind):
        return list(column.to_numpy(zero_copy_only=False))
    if isinstance(kind, pa.FixedShapeTensorType):
        return list(column.to_numpy_ndarray().copy())
    if pa.types.is_fixed_size_list(kind) and _is_plain(kind.value_type):
        return list(_writable(column.flatten()).reshape(len(column), kind.list_size))
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_plain(kind.value_type):
        edges = column.offsets.to_numpy()
        return np.split(_writable(column.flatten()), edges[1:-1] - edges[0])
    values: list[Any] = column.to_pylist()
    return values


def _writable(column: Any) -> Any:
    # a view of Arrow's memory is read-only: users' transforms write in place, and torch warns
    return np.array(column.to_numpy(zero_copy_only=False))


def _is_plain(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _row_groups(fragments: Sequence[Any]) -> tuple[list[tuple[int, int]], Indices]:
    """Return the (file, row group) pairs that have rows, and the first row number of each, followed by the total."""
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        footers = list(pool.map(lambda fragment: [(g.id, g.num_rows) for g in fragment.row_groups], fragments))
    found = [(file, number, rows) for file, footer in enumerate(footers) for number, rows in footer if rows]
    starts = np.concatenate([[0], np.cumsum([rows for _, _, rows in found])]).astype(np.int64)
    return [(file, number) for file, number, _ in found], starts


def _find(source: Source | Sequence[Source], filesystem: Any) -> tuple[Any, list[str], str | None]:
    """Return the file system, the paths of all files, and the base directory if `source` is a single directory."""
    sources = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if not sources:
        raise FileNotFoundError("source must name at least 1 file, but is an empty list")
    places = [_resolve(os.fspath(one), filesystem) for one in sources]
    found = places[0][0]
    for number, (other, _) in enumerate(places):
        if not other.equals(found):
            raise ValueError(f"all sources must be in one file system, but {sources[0]} and {sources[number]} are not")
    paths: list[str] = []
    base = None
    for (_, path), name in zip(places, sources, strict=True):
        info = found.get_file_info(path)
        if info.type == pa.fs.FileType.NotFound:
            raise FileNotFoundError(f"source must exist, but there is nothing at {name}")
        if info.type != pa.fs.FileType.Directory:
            paths.append(path)
            continue
        base = path if len(sources) == 1 else None
        paths += _parquet_below(found, path, shown=str(name))
    return found, paths, base


def _parquet_below(filesystem: Any, path: str, *, shown: str) -> list[str]:
    """Return the Parquet files below a directory, sorted; raises FileNotFoundError if none exist."""
    below = [
        info.path
        for info in filesystem.get_file_info(pa.fs.FileSelector(path, recursive=True))
        if info.type == pa.fs.FileType.File
    ]
    names = [one for one in below if not one[len(path) :].rpartition("/")[2].startswith((".", "_"))]
    paths = sorted(one for one in names if one.lower().endswith((".parquet", ".pq")))
    if not paths:
        raise FileNotFoundError(
            f"source must have files named *.parquet or *.pq, but none of {len(below)} below {shown} is; "
            "pass a list of files if they are named otherwise"
        )
    return paths


def _resolve(source: str, filesystem: Any) -> tuple[Any, str]:
    """Return a source's file system and path; raises TypeError or ValueError if the file system is unknown."""
    if filesystem is not None:
        if isinstance(filesystem, pa.fs.FileSystem):
            return filesystem, source
        if hasattr(filesystem, "protocol"):
            return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(filesystem)), source
        raise TypeError(f"filesystem must be pyarrow's or fsspec's, but got {type(filesystem).__name__}")
    if "://" not in source:
        return pa.fs.LocalFileSystem(), os.path.abspath(source)
    try:
        found, path = pa.fs.FileSystem.from_uri(source)
    except pa.ArrowInvalid as unknown:
        return _through_fsspec(source, unknown)
    return found, path


def _through_fsspec(source: str, unknown: Exception) -> tuple[Any, str]:
    """Return the file system and path of a source whose URI scheme only fsspec supports."""
    try:
        import fsspec

        found, path = fsspec.url_to_fs(source)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"the scheme of {source!r} must be one that pyarrow knows (file, s3, gs, hdfs, abfs) or "
            f"an installed fsspec package does, but: {unknown}; {error}"
        ) from error
    return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(found)), path


def _check_columns(columns: Sequence[str] | None, present: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(present) if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)
    missing = [name for name in chosen if name not in present]
    if missing or not chosen:
        raise ValueError(f"columns must be some of {list(present)}, but got {list(chosen)}")
    return chosen


def _shown(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
