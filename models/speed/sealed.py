"""Files that end with a digest of what is in them, so that damage shows before they are used.

The digest stands behind the content: readers of zip archives look for their end from behind, and
pass over what follows it.
"""

import hashlib
import os
from pathlib import Path

_PIECE_BYTES = 1 << 20
_LEAD = b"\nsha256:"
_SEAL_BYTES = len(_LEAD) + 64 + 1


class DamagedError(Exception):
    """The content of a file is not what was written."""


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file with its digest, all at once.

    Raises:
        OSError: It cannot be written.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    seal(draft, path)


def seal(draft: Path, path: Path) -> None:
    """Give a file its digest, and then its name.

    Raises:
        OSError: It cannot be written.
    """
    with draft.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(_LEAD + digest.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def unsealed(content: bytes) -> bytes:
    """What was written, of the whole of a file.

    Raises:
        DamagedError: It has changed since.
    """
    own, end = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    if end != _LEAD + hashlib.sha256(own).hexdigest().encode() + b"\n":
        raise DamagedError("its digest does not fit")
    return own


def check_seal(path: Path) -> None:
    """See that a file, which may be large, is what was written.

    Raises:
        DamagedError: It has changed since.
        OSError: It cannot be read.
    """
    if not path.is_file() or path.is_symlink():
        raise DamagedError("it is no regular file")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - _SEAL_BYTES
        while left > 0:
            piece = file.read(min(_PIECE_BYTES, left))
            if not piece:
                raise DamagedError("it has become shorter")
            digest.update(piece)
            left -= len(piece)
        if left or file.read() != _LEAD + digest.hexdigest().encode() + b"\n":
            raise DamagedError("its digest does not fit")
