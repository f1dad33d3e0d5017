"""A directory of which a power failure leaves what has reached the disk: see ``PowerLoss``."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

Names = dict[int, dict[str, int]]
Contents = dict[int, bytes]


class PowerLoss:
    """Looks at a directory whenever something reaches the disk, is moved or deleted, and makes what failures may leave.

    Only ``fsync`` of a file makes its content last, and of a directory the names in it. At each moment nothing that
    waits may have reached the disk, or everything, or any one change of a name alone, or all but one; a file's content
    is that of its last ``fsync`` (none without one), or the present one.

    Args:
        root: the directory; what is in it lasts.
        scratch: where failures' remains are made.
        check: takes the directory that a failure leaves.
    """

    def __init__(self, root: Path, scratch: Path, check: Callable[[Path], object]) -> None:
        self.root, self._scratch, self._check = root, scratch, check
        self.states = 0
        self._numbers = itertools.count(1)
        self._known: dict[int, int] = {}  # of inodes that are there now
        self._names: Names = {}  # that last
        self._contents: Contents = {}
        names, contents = self._poll()
        self._names, self._contents = names, contents

    @contextlib.contextmanager
    def watched(self) -> Iterator[Recorded]:
        """Give the file system whose changes are looked at."""
        real = os.fsync

        def fsync(descriptor: int) -> None:
            self.fail()
            real(descriptor)
            self._keep(os.fstat(descriptor))
            self.fail()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            yield Recorded(self)
        self.fail()

    def fail(self) -> None:
        """Have all that a failure now may leave checked."""
        names, contents = self._poll()
        for chosen in self._choices(names):
            for remain in (self._contents, self._contents | contents):
                self.states += 1
                target = self._scratch / str(self.states)
                self._make(target, 0, chosen, remain)
                self._check(target)

    def _poll(self) -> tuple[Names, Contents]:
        """Return the present names and contents, by numbers that no other file has had."""
        names, contents, seen = Names(), Contents(), dict[int, int]()

        def look(path: Path) -> int:
            found = path.stat()
            number = 0 if path == self.root else self._known.get(found.st_ino) or next(self._numbers)
            seen[found.st_ino] = number
            if stat.S_ISDIR(found.st_mode):
                names[number] = {each.name: look(each) for each in path.iterdir()}
            else:
                contents[number] = path.read_bytes()
            return number

        look(self.root)
        self._known = seen
        return names, contents

    def _keep(self, found: os.stat_result) -> None:
        names, contents = self._poll()
        number = self._known.get(found.st_ino)
        if number in names:
            self._names[number] = names[number]
        elif number in contents:
            self._contents[number] = contents[number]

    def _choices(self, now: Names) -> Iterator[Names]:
        lasting = {number: self._names.get(number, {}) for number in now} | self._names
        latest = lasting | now
        yield lasting
        changes = [
            (number, name)
            for number in latest
            for name in lasting[number].keys() | latest[number].keys()
            if lasting[number].get(name) != latest[number].get(name)
        ]
        if changes:
            yield latest
        for number, name in changes if len(changes) > 1 else ():
            yield lasting | {number: _with(lasting[number], name, latest[number])}
            yield latest | {number: _with(latest[number], name, lasting[number])}

    def _make(self, target: Path, number: int, names: Names, contents: Contents) -> None:
        target.mkdir()
        for name, each in names[number].items():
            if each in names:
                self._make(target / name, each, names, contents)
            else:
                (target / name).write_bytes(contents.get(each, b""))


def _with(names: dict[str, int], name: str, of: dict[str, int]) -> dict[str, int]:
    others = {each: number for each, number in names.items() if each != name}
    return others | ({name: of[name]} if name in of else {})


class Recorded(pyarrow.fs.LocalFileSystem):
    """The local file system, with a look before each change of names."""

    def __init__(self, loss: PowerLoss) -> None:
        super().__init__()
        self.loss = loss

    def move(self, *paths: Any) -> None:
        self.loss.fail()
        super().move(*paths)
        self.loss.fail()

    def delete_file(self, path: str) -> None:
        super().delete_file(path)
        self.loss.fail()

    def delete_dir(self, path: str) -> None:
        super().delete_dir(path)
        self.loss.fail()
