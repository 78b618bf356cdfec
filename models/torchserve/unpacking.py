"""Unpacks archives of TorchServe: into a folder that a person names, or for a worker. No torch.

Workers of one archive share a folder below the folder of temporary files (TMPDIR moves it), as
those of TorchServe do. Each holds a lock on it, which ends with its process however that ends. The
next worker that unpacks anything deletes what nobody holds.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from inferpool.models.errors import SourceError
from inferpool.models.files.opened import announce
from inferpool.models.torchserve.members import PIECE_BYTES, ArchiveReader, opened_archive, reading

_FILES = "files"
_WAIT_S = 300.0
"""The longest wait for another worker that unpacks the same archive."""
_POLL_S = 0.05


def unpack(path: Path, folder: Path) -> None:
    """Unpack an archive into a new folder, whole or not at all. Runs nothing of it.

    Args:
        path: A `.mar` or `.tar.gz`.
        folder: A folder that is not there, or is empty.

    Raises:
        SourceError: The archive is refused or cannot be read, or the folder cannot be written; says
            why, and names the member.
    """
    with opened_archive(path) as archive:
        try:
            _unpack_all(path, archive, folder)
        except OSError as error:
            raise SourceError(
                f"{path} cannot be unpacked to {folder}: {error.strerror or error}"
            ) from None


def unpacked(path: Path) -> Path:
    """Return a folder with the content of an archive, for as long as this process lives.

    An archive that is a folder is that folder.

    Raises:
        SourceError: The archive is refused, cannot be read, or has no room.
    """
    if path.is_dir():
        return path.absolute()
    announce(path)
    root = _own_root()
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            _sweep(root, digest)
            return _shared(path, file, root / digest)
    except OSError as error:
        raise SourceError(
            f"{path} cannot be unpacked to {root}: {error.strerror or error}; TMPDIR names "
            "another place for temporary files"
        ) from None


def _unpack_all(path: Path, archive: ArchiveReader, folder: Path) -> None:
    total = sum(archive.files().values())  # refuses the archive before anything is written
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if total > free:
        raise SourceError(
            f"{path} unpacks to {total >> 20:,} MiB, and {folder.parent} has room for "
            f"{free >> 20:,} MiB"
        )
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    draft.mkdir()  # with the rights that this user gives to folders
    try:
        for name, num_bytes, content in archive.members():
            place = draft / name
            if content is None:
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(path, place, name, num_bytes, content)
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # an empty one, or it fails
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(path: Path, place: Path, name: str, num_bytes: int, content: BinaryIO) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    written = 0
    with open(os.open(place, flags, 0o666), "wb") as file:
        while piece := content.read(PIECE_BYTES):
            written += len(piece)
            if written > num_bytes:
                break
            file.write(piece)
    if written != num_bytes:
        raise SourceError(
            f"{path}: the member {name!r} has another size than the archive says; copy or download "
            "it again"
        )


def _own_root() -> Path:
    """Return the folder of this user's archives; make it if there is none.

    Raises:
        SourceError: It is somebody else's, or cannot be made.
    """
    root = Path(tempfile.gettempdir(), f"inferpool-archives-{os.getuid()}")
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(root)
    except OSError as error:
        raise SourceError(f"the folder {root} cannot be made: {error.strerror}") from None
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or stat.S_IMODE(status.st_mode) & 0o077:
        raise SourceError(
            f"{root} is not a folder of this user alone: delete it, or set TMPDIR to another place"
        )
    return root


def _shared(path: Path, file: BinaryIO, folder: Path) -> Path:
    """Return the files in a folder, unpacked by whichever worker comes first."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):  # another one swept it away meanwhile
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            is_held = False
            try:
                if _locks(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, folder):
                    for each in folder.iterdir():  # handlers write there, and killed workers leave
                        shutil.rmtree(each, ignore_errors=True)
                    file.seek(0)
                    with reading(path, file) as archive:
                        _unpack_all(path, archive, folder / _FILES)
                # This may give up the one lock before it gets the other: ask again what is there.
                is_held = (
                    _locks(descriptor, fcntl.LOCK_SH)
                    and _is_at(descriptor, folder)
                    and (folder / _FILES).is_dir()
                )
                if is_held:
                    return folder / _FILES
            finally:
                if not is_held:  # else it has the lock, and stays open
                    os.close(descriptor)
        time.sleep(_POLL_S)
    raise SourceError(f"{path}: another process has not unpacked it to {folder} in {_WAIT_S:g} s")


def _locks(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, folder: Path) -> bool:
    """Return whether an open folder is still the one of that path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(folder, follow_symlinks=False))
    return False


def _sweep(root: Path, wanted: str) -> None:
    """Delete the folders that no worker holds, but for the one that is wanted."""
    for folder in root.iterdir():
        if folder.name == wanted:
            continue
        with contextlib.suppress(OSError):  # another worker may delete it meanwhile
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if _locks(descriptor, fcntl.LOCK_EX):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
