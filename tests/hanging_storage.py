"""A file system that stops answering, or fails, for as long as a marker file says so; in every process that has it."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pyarrow.fs


class HangingHandler(pyarrow.fs.FileSystemHandler):
    """Directory ``root`` of this machine, as storage that is not local.

    Args:
        root: the directory.
        marker: file that makes calls hang whose path contains its text, until it is gone. Where the text begins with
            "fail " or "deny " such calls fail instead.
    """

    def __init__(self, root: str, marker: str) -> None:
        self.root, self.marker = root, marker
        self._files = pyarrow.fs.SubTreeFileSystem(root, pyarrow.fs.LocalFileSystem())

    def __reduce__(self) -> Any:
        return HangingHandler, (self.root, self.marker)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HangingHandler) and other.root == self.root

    def _ask(self, *paths: str) -> Any:
        while True:
            try:
                text = Path(self.marker).read_text()
            except FileNotFoundError:
                return self._files
            if not any(text.removeprefix("fail ").removeprefix("deny ") in path for path in paths):
                return self._files
            if text.startswith("deny "):
                raise PermissionError(errno.EACCES, "the storage has denied", paths[0])
            if text.startswith("fail "):
                raise OSError(f"the storage has a bad moment: {paths}")
            time.sleep(0.02)

    def get_type_name(self) -> str:
        return "hanging"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self._ask(*paths).get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._ask(selector.base_dir).get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._ask(path).create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._ask(path).delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._ask(path).delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._ask(path).delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self._ask(src, dest).move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._ask(src, dest).copy_file(src, dest)

    def open_input_stream(self, path: str) -> Any:
        return self._ask(path).open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._ask(path).open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._ask(path).open_output_stream(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._ask(path).open_append_stream(path)


class HangingStorage:
    """Such a file system below a folder of a test, and what it holds."""

    def __init__(self, folder: Path) -> None:
        self.root, self._marker = folder / "remote", folder / "hangs"
        self.root.mkdir()
        self.filesystem = pyarrow.fs.PyFileSystem(HangingHandler(str(self.root), str(self._marker)))

    def hang(self, paths: str = "") -> None:
        """Do not answer calls on paths that contain this."""
        self._say(paths)

    def fail(self, paths: str = "") -> None:
        """Refuse them."""
        self._say(f"fail {paths}")

    def deny(self, paths: str = "") -> None:
        """Refuse them, as what this user may not touch."""
        self._say(f"deny {paths}")

    def _say(self, text: str) -> None:
        part = self._marker.with_suffix(".part")
        part.write_text(text)
        part.rename(self._marker)

    def answer(self) -> None:
        """Be well again."""
        self._marker.unlink(missing_ok=True)
