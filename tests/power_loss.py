"""Record what a run does to its files, and make of it what a loss of power could leave on the disk.

A disk promises this much and no more:

    fsync of a file      its content
    fsync of a folder    its names as they are, not what is in the files they name
    anything else        may be there or not, in any order. A file that was not synced may have
                         its old content, none, a beginning of the new one, or zeros in its place;
                         a name may be missing, or still be there after its removal. Only a rename
                         does not lose its file: the old name does not go before the new one comes.

What is written from outside Python (Arrow) is seen by looking at the whole folder before each
operation; after each one the folder must be what the record says, so that nothing escapes it.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

# a name in a folder: the folder's number and the name
Place = tuple[int, str]
# a name that comes to mean a file or a folder, or goes (None)
Change = tuple[Place, int | None]
# what lies in a folder, by path; None for a folder
Tree = dict[str, bytes | None]
ROOT = 0


@dataclass
class File:
    """A file: what it holds, what of that is on the disk for certain, and all it held since."""

    content: bytes = b""
    synced: bytes = b""
    since: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Wrote:
    file: int
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Synced:
    number: int


@dataclass(frozen=True)
class Named:
    """Names that come, go (None) or change together; `folder` says that a folder is new."""

    changes: tuple[Change, ...]
    folder: bool = False


@dataclass(frozen=True)
class Told:
    """Something that a run was told is committed, and so its user may have been."""

    what: Any


Event = Wrote | Synced | Named | Told


class Disk:
    """A folder and what of it is on the disk for certain, after some events."""

    def __init__(self) -> None:
        self.files: dict[int, File] = {}
        self.folders: dict[int, dict[str, int]] = {ROOT: {}}
        self._synced: dict[int, dict[str, int]] = {ROOT: {}}
        self._pending: list[tuple[Change, ...]] = []

    @staticmethod
    def of(root: Path) -> Disk:
        """A disk that holds a folder for certain."""
        recorder = Recorder(root)
        recorder.look()
        disk = recorder.disk
        for number in [*disk.files, *disk.folders]:
            disk.apply(Synced(number))
        return disk

    def apply(self, event: Event) -> None:
        """Let an event happen."""
        match event:
            case Wrote(number, content):
                file = self.files[number]
                file.content = content
                file.since.append(content)
            case Named(changes, folder):
                for place, number in changes:
                    self._name(place, number, folder)
                self._pending.append(changes)
            case Synced(number) if number in self.folders:
                self._sync_folder(number)
            case Synced(number):
                file = self.files[number]
                file.synced, file.since = file.content, []

    def tree(self) -> Tree:
        """What whoever looks sees, by path; None for a folder."""
        return dict(self._walk(self.folders, {n: file.content for n, file in self.files.items()}))

    def after_loss(self, draw: random.Random) -> Tree:
        """What may be there after a loss of power at this moment, drawn at random."""
        # all that is not certain is lost, or is there, or some of it: the ends matter most
        chance = draw.choice([0.0, 0.5, 0.5, 0.9, 1.0])
        content_chance = draw.choice([0.0, 0.5, 1.0])
        kept: list[Change] = []
        for changes in self._pending:
            if draw.random() >= chance:
                continue
            leaves, comes = _leaves(changes), _comes(changes)
            # a rename may have reached the new folder and not the old one
            kept += [*comes, *(leaves if not comes or draw.random() < 0.7 else [])]
        return self._left(
            kept,
            {
                number: file.content if draw.random() < content_chance else _torn(file, draw)
                for number, file in self.files.items()
            },
        )

    def after_each_loss(self, draw: random.Random, drawn: int) -> Iterator[Tree]:
        """What may be there after a loss of power at this moment, in good order.

        Everything that is not certain lost, everything kept; each single operation alone lost,
        and alone kept, where a rename may also be done by half; each file alone torn in each way.
        And so many drawn at random. One tree may come several times.
        """
        names = [change for changes in self._pending for change in changes]
        whole = {number: file.content for number, file in self.files.items() if file.since}
        for kept in ([], names):
            for contents in ({}, whole):
                yield self._left(kept, contents)
        for place, changes in enumerate(self._pending):
            before = [change for earlier in self._pending[:place] for change in earlier]
            after = [change for later in self._pending[place + 1 :] for change in later]
            halves = [half] if (half := _comes(changes)) and half != list(changes) else []
            for some in ([], *halves):
                yield self._left([*before, *some, *after], whole)
            for some in (list(changes), *halves):
                yield self._left(some, whole)
                yield self._left(some, {})
        for number in whole:
            yield self._left([], {number: whole[number]})
            yield self._left(names, {number: whole[number]})
            for torn in _each_torn(self.files[number]):
                yield self._left(names, {**whole, number: torn})
                yield self._left(names, {number: torn})
        for _ in range(drawn):
            yield self.after_loss(draw)

    def _left(self, kept: Iterable[Change], contents: Mapping[int, bytes]) -> Tree:
        """What is certain, with these changes of names and these contents beside it."""
        names = {number: dict(entries) for number, entries in self._synced.items()}
        for change in kept:
            _set(names, change)
        synced = {number: file.synced for number, file in self.files.items()}
        whole = {number: names.get(number, {}) for number in self.folders}
        return dict(self._walk(whole, {**synced, **contents}))

    def _name(self, place: Place, number: int | None, folder: bool) -> None:
        if number is None:
            del self.folders[place[0]][place[1]]
            return
        self.folders[place[0]][place[1]] = number
        if folder:
            self.folders.setdefault(number, {})
            self._synced.setdefault(number, {})
        elif number not in self.folders:
            self.files.setdefault(number, File())

    def _sync_folder(self, folder: int) -> None:
        waiting = []
        for changes in self._pending:
            mine = [change for change in changes if change[0][0] == folder]
            if mine and mine == _leaves(changes):
                # the old name of a rename does not go before the new one comes
                mine = list(changes)
            for change in mine:
                _set(self._synced, change)
            rest = tuple(change for change in changes if change not in mine)
            if rest:
                waiting.append(rest)
        self._pending = waiting

    def _walk(
        self, folders: dict[int, dict[str, int]], content: dict[int, bytes]
    ) -> Iterator[tuple[str, bytes | None]]:
        waiting = [("", ROOT)]
        while waiting:
            path, number = waiting.pop()
            for name, inside in folders[number].items():
                if inside in content:
                    yield f"{path}{name}", content[inside]
                else:
                    yield f"{path}{name}", None
                    waiting.append((f"{path}{name}/", inside))


def _leaves(changes: tuple[Change, ...]) -> list[Change]:
    return [change for change in changes if change[1] is None]


def _comes(changes: tuple[Change, ...]) -> list[Change]:
    return [change for change in changes if change[1] is not None]


def _set(names: dict[int, dict[str, int]], change: Change) -> None:
    (folder, name), number = change
    if number is None:
        names[folder].pop(name, None)
    else:
        names[folder][name] = number


def _torn(file: File, draw: random.Random) -> bytes:
    """What may be left of a file of which not all is synced."""
    if not file.since:
        return file.synced
    new = draw.choice(file.since)
    kept = _kept(file, new)
    cut = draw.randint(kept, max(kept, len(new)))
    return draw.choice([file.synced, new, new[:cut], new[:cut] + bytes(len(new) - cut)])


def _each_torn(file: File) -> Iterator[bytes]:
    """What may be left of a file of which not all is synced: the old, and each way to be torn."""
    yield file.synced
    for new in file.since:
        kept = _kept(file, new)
        for cut in sorted({kept, (kept + len(new)) // 2, max(kept, len(new) - 1)}):
            yield new[:cut]
            yield new[:cut] + bytes(len(new) - cut)


def _kept(file: File, new: bytes) -> int:
    """How much of the beginning of what was written is certain: that to which it was added."""
    return len(file.synced) if new.startswith(file.synced) else 0


class Recorder:
    """Records the events of one folder while `recording()`; may go on with what was there."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.events: list[Event] = []
        self._root = root
        self.disk = disk if disk is not None else Disk()
        self._lock = threading.RLock()
        self._next = 1 + max([ROOT, *self.disk.files, *self.disk.folders])
        self._numbers: dict[int, int] = {}
        self._stamps: dict[int, tuple[int, int]] = {}
        if disk is not None:
            self._recognise()

    def tell(self, what: Any) -> None:
        """Note that something was told to be committed."""
        with self._lock:
            self.look()
            self._add(Told(what))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all that this process does; nothing is really synced meanwhile."""
        with mock.patch.multiple(
            os,
            fsync=self._fsync,
            rename=self._rename(os.rename),
            replace=self._rename(os.replace),
            link=self._link(os.link),
            unlink=self._remove(os.unlink),
            remove=self._remove(os.remove),
            rmdir=self._remove(os.rmdir),
            mkdir=self._mkdir(os.mkdir),
        ):
            yield
        with self._lock:
            self.look()

    def _add(self, event: Event) -> None:
        self.events.append(event)
        self.disk.apply(event)

    def _fsync(self, descriptor: int) -> None:
        with self._lock:
            self.look()
            number = self._numbers.get(os.fstat(descriptor).st_ino)
            if number is not None:
                self._add(Synced(number))

    def _rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            with self._lock:
                self.look()
                real(source, target, **options)
                old, new = self._place(source), self._place(target)
                assert (old is None) == (new is None), "renamed across the edge of the folder"
                if old is not None and new is not None:
                    number = self.disk.folders[old[0]][old[1]]
                    self._add(Named(((new, number), (old, None))))
                    self._check()

        return rename

    def _link(self, real: Callable[..., None]) -> Callable[..., None]:
        def link(source: Any, target: Any, **options: Any) -> None:
            with self._lock:
                self.look()
                real(source, target, **options)
                old, new = self._place(source), self._place(target)
                if old is not None and new is not None:
                    self._add(Named(((new, self.disk.folders[old[0]][old[1]]),)))
                    self._check()

        return link

    def _remove(self, real: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, **options: Any) -> None:
            with self._lock:
                self.look()
                real(path, **options)
                place = self._place(_absolute(path, options.get("dir_fd")))
                if place is not None:
                    self._add(Named(((place, None),)))
                    self._check()

        return remove

    def _mkdir(self, real: Callable[..., None]) -> Callable[..., None]:
        def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
            with self._lock:
                self.look()
                real(path, *arguments, **options)
                # seen as it is made, not only before the next operation
                self.look()

        return mkdir

    def _place(self, path: Any) -> Place | None:
        """Where a name stands; None outside of the folder."""
        path = Path(path)
        if self._root not in path.parents:
            return None
        number = ROOT
        for name in path.parent.relative_to(self._root).parts:
            number = self.disk.folders[number][name]
        return number, path.name

    def _recognise(self) -> None:
        """Take what lies in the folder for what the disk says is there."""
        for path, number, entry in self._entries():
            assert number is not None, f"`{path}` is not on the disk"
            self._numbers[entry.st_ino] = number
            self._stamps[number] = (entry.st_size, entry.st_mtime_ns)

    def look(self) -> None:
        """Record what has come or changed since the last look, whoever did it."""
        if not self._root.exists():
            return
        for path, number, entry in self._entries():
            if number is None:
                number = self._appeared(path, entry)
            known = self._numbers.get(entry.st_ino)
            assert known == number, f"`{path}` was replaced without a record"
            stamp = (entry.st_size, entry.st_mtime_ns)
            if not stat.S_ISDIR(entry.st_mode) and self._stamps.get(number) != stamp:
                self._stamps[number] = stamp
                content = path.read_bytes()
                if content != self.disk.files[number].content:
                    self._add(Wrote(number, content))

    def _appeared(self, path: Path, entry: os.stat_result) -> int:
        place = self._place(path)
        assert place is not None
        number, self._next = self._next, self._next + 1
        self._numbers[entry.st_ino] = number
        self._add(Named(((place, number),), folder=stat.S_ISDIR(entry.st_mode)))
        return number

    def _entries(self) -> Iterator[tuple[Path, int | None, os.stat_result]]:
        """Everything in the folder with the number that the record knows it by, folders first."""
        waiting = [(self._root, ROOT)]
        self._numbers[self._root.stat().st_ino] = ROOT
        while waiting:
            folder, number = waiting.pop()
            with os.scandir(folder) as entries:
                found = list(entries)
            for entry in found:
                path = Path(entry.path)
                said = entry.stat(follow_symlinks=False)
                known = self.disk.folders[number].get(entry.name)
                yield path, known, said
                if entry.is_dir():
                    waiting.append((path, self.disk.folders[number][entry.name]))

    def _check(self) -> None:
        """Hold that the folder has no other names than the record."""
        found = {
            path.relative_to(self._root).as_posix()
            for path, number, _ in self._entries()
            if number is not None
        }
        gone = self.disk.tree().keys() - found
        assert not gone, f"removed without a record: {sorted(gone)}"


def _absolute(path: Any, folder: int | None) -> Path:
    """The path of a name in an open folder, as `shutil.rmtree` removes them."""
    return Path(path) if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}"), path)


def tree_of(root: Path) -> Tree:
    """What lies in a folder, by path; None for a folder."""
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def build(tree: Tree, root: Path) -> None:
    """Make a folder of what was left a day ago, in place of the one that is there."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    long_ago_s = time.time() - 86400
    for name, content in sorted(tree.items()):
        if content is None:
            (root / name).mkdir(exist_ok=True)
        else:
            (root / name).write_bytes(content)
            os.utime(root / name, (long_ago_s, long_ago_s))
