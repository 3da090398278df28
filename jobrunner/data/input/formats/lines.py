"""Read lines of text files, compressed or not, from any place on. Knows nothing of records."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa

from jobrunner.data.input.files import File

# a longer line is no record of ours: reading it whole would cost the memory of the job
LINE_BYTES = 64 * 2**20
_BUFFER_BYTES = 256 * 2**10
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}
_BOM = b"\xef\xbb\xbf"


class LineTooLong(Exception):  # noqa: N818 - it passes through csv.reader and is caught there
    """A line is over `LINE_BYTES`; reading can go on after it."""


class Lines:
    """The lines of a file with their ends, as bytes; `offset` is where the next one begins.

    Offsets count uncompressed bytes. The first bytes of a file say how it is compressed, not its
    name. `digest`, if any, is fed the file's own bytes as they are read.
    """

    def __init__(self, file: File, digest: Any = None) -> None:
        self._file: Any = file.open()
        hashed: Any = self._file if digest is None else _Hashed(self._file, digest)
        self._bytes = io.BufferedReader(hashed, _BUFFER_BYTES)
        self.start = self._bytes.peek(4)[:4]
        codec = _CODECS.get(self.start[:2])
        self.compressed = codec is not None
        self._text: Any = self._bytes
        if codec is not None:
            stream = pa.CompressedInputStream(pa.PythonFile(self._bytes, "r"), codec)
            self._text = io.BufferedReader(stream, _BUFFER_BYTES)
        self.offset = 0

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> bytes:
        """The next line. Raises LineTooLong."""
        # one byte more, for the line's end
        line: bytes = self._text.readline(LINE_BYTES + 1)
        if not line:
            raise StopIteration
        self.offset += len(line)
        if len(line) > LINE_BYTES and not line.endswith(b"\n"):
            self._drop_line()
            raise LineTooLong
        if self.offset == len(line):
            return line.removeprefix(_BOM)
        return line

    def seek(self, offset: int) -> None:
        """Go to an offset further on: at once, or through all that is compressed before it."""
        if not self.compressed:
            self._text.seek(offset)
            self.offset = offset
        while self.offset < offset:
            skipped = len(self._text.read(min(offset - self.offset, _BUFFER_BYTES)))
            if not skipped:
                raise EOFError(f"it ends after {self.offset:,} bytes of text")
            self.offset += skipped

    def drain(self) -> None:
        """Read what is left of the file's own bytes, for the digest."""
        while self._bytes.read(_BUFFER_BYTES):
            pass

    def close(self) -> None:
        self._text.close()
        self._bytes.close()
        self._file.close()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drop_line(self) -> None:
        while piece := self._text.readline(_BUFFER_BYTES):
            self.offset += len(piece)
            if piece.endswith(b"\n"):
                return


class _Hashed(io.RawIOBase):
    """Passes bytes on and hashes them."""

    def __init__(self, file: Any, digest: Any) -> None:
        self._file = file
        self._digest = digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:size])
        return size
