"""A file system that is slow or fails while a file says so, whichever process uses it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pyarrow.fs


class ShakyStorage(pyarrow.fs.FileSystemHandler):
    """The local file system, as an object store may be.

    Args:
        marker: path of the file that says ``slow`` (every call takes a while) or ``fail`` (every call raises); while it
            is not there all is well.
    """

    SLOW_S = 0.3

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._files = pyarrow.fs.LocalFileSystem()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShakyStorage, (self._marker,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShakyStorage) and other._marker == self._marker

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._marker)

    def _suffer(self) -> Any:
        with contextlib.suppress(FileNotFoundError):
            said = Path(self._marker).read_text()
            if said == "fail":
                raise OSError("the storage fails, as the test wants")
            if said == "slow":
                time.sleep(self.SLOW_S)  # what it is to show: a slow storage
        return self._files

    def get_type_name(self) -> str:
        return "shaky"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._suffer().get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._suffer().get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._suffer().create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._suffer().delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._suffer().delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._suffer().delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self._suffer().move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._suffer().copy_file(src, dest)

    def open_input_stream(self, path: str) -> Any:
        return self._suffer().open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._suffer().open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._suffer().open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._suffer().open_append_stream(path, metadata=metadata)


def shaky(marker: Path) -> Any:
    """The file system for ``RunConfig(storage_filesystem)``."""
    return pyarrow.fs.PyFileSystem(ShakyStorage(str(marker)))
