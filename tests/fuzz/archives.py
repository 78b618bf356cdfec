"""Hostile archives of TorchServe's form, which `inferpool import` must refuse or unpack whole.

`python -m tests.fuzz.archives 50000` tries that many in this process, and prints what must not be.
"""

import gzip
import io
import json
import os
import shutil
import stat
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from inferpool.models.errors import SourceError
from inferpool.models.torchserve.archive import read_facts
from inferpool.models.torchserve.members import FREE_BYTES, MAX_RATIO
from inferpool.models.torchserve.unpacking import unpack
from tests.fuzz.mutate import mutate
from tests.models.torchserve.archives import files_of

_NAMES = (
    *("../x", "/etc/x", "a/../../x", "C:\\x", "\\\\h\\x", "a\\..\\x", "..", ".", "", "a//b", "./a"),
    *("handler.py", "HANDLER.PY", "MAR-INF", "MAR-INF/manifest.json", "handler.py/x", "a/", "a\0b"),
    *("~/x", "$HOME", "a" * 300, "/".join("a" * 60), "\u202e", "e\u0301", "\u00e9", "con", "x\n"),
    *("MAR-INF/../../x", "data.txt/", "-rf", "a:b", "\U0001f600", "*", "__pycache__/x.pyc"),
)
_JUNK: tuple[Any, ...] = (
    None, 0, -1, 1.5, "", "x", [], {}, True, "../x", "handler.py:f", "a" * 5000, [1], {"a": 1},
    "/etc/passwd", "handler", "handler.py", "no.py", "1.0", "\0", 10**30,
)  # fmt: skip
_FIELDS = (
    *("modelName", "modelVersion", "handler", "modelFile", "serializedFile", "extraFiles"),
    *("requirementsFile", "configFile", "x"),
)
_MODES = (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK, stat.S_IFDIR, stat.S_IFREG, 0)
_CONFIGS = (
    *(
        "batchSize: 8\n",
        "batchSize: 99999999999\n",
        "a: &a [*a]\n",
        "\t- x",
        "!!python/name:os.system",
    ),
    *("minWorkers: -1\n", "{" * 5000, "&a [" * 500, "x: \0", "batchSize: [8]\nmaxBatchDelay: x\n"),
)
_HEADERS = (
    (b"PK\x01\x02", ((8, 2), (10, 2), (20, 4), (24, 4), (28, 2), (30, 2), (38, 4), (42, 4))),
    (b"PK\x03\x04", ((6, 2), (8, 2), (18, 4), (22, 4), (26, 2), (28, 2))),
    (b"PK\x05\x06", ((8, 2), (10, 2), (12, 4), (16, 4), (20, 2))),
)
"""Headers of a zip by how they begin, with the places and sizes of their fields."""
_TYPES = (
    *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.REGTYPE),
    *(tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE, b"Z"),
)
_MOST_S = 20.0
"""Time within which any of these small archives is read and unpacked."""


def make_archive(seed: int, number: int) -> bytes:
    """Return the archive of a number."""
    maker = Random(f"archive-{seed}-{number}")
    fields: dict[str, Any] = {}
    if maker.random() < 0.3:
        fields = {name: maker.choice(_JUNK) for name in maker.sample(_FIELDS, maker.choice((1, 2)))}
    files: dict[str, str | bytes] = {"data.txt": "x" * 100}
    if maker.random() < 0.2:
        files["model-config.yaml"] = maker.choice(_CONFIGS)
        fields.setdefault("configFile", "model-config.yaml")
    members = files_of("toy", files, **fields)
    if maker.random() < 0.1:
        odd = maker.choice(
            (b"", b"{", b"[]", b"[" * 50_000, b"\xff", json.dumps(_JUNK[5]).encode())
        )
        members["MAR-INF/MANIFEST.json"] = odd
    made = _tar(maker, members) if maker.random() < 0.3 else _zip(maker, members)
    return mutate(maker, made, [made]) if maker.random() < 0.4 else made


def complaint_about(data: bytes, folder: Path) -> tuple[str, str]:
    """Read and unpack an archive below a folder; return how that ended, and what must not be."""
    archive, target = folder / "in" / "toy.mar", folder / "out" / "toy"
    archive.parent.mkdir(parents=True)
    target.parent.mkdir(parents=True)
    archive.write_bytes(data)
    began = time.monotonic()
    wrong = ""
    try:
        facts = read_facts(archive)
        json.dumps([facts.name, facts.version, facts.files, facts.code])
        unpack(archive, target)
        end = "unpacked"
    except SourceError as error:
        end = "refused"
        if len(str(error)) > 2000 or "\0" in str(error):
            wrong = f"the error is {len(str(error))} characters long, or has a zero in it"
    except Exception as error:
        end, wrong = "raised", repr(error)[:500]
    if (took_s := time.monotonic() - began) > _MOST_S:
        wrong = f"it took {took_s:.1f} s"
    found = [path for path in folder.rglob("*") if path not in (archive, archive.parent)]
    outside = [path for path in found if path not in (target.parent, target, *target.rglob("*"))]
    if outside or (end != "unpacked" and target.exists()):
        wrong = f"left behind: {outside or target}"
    odd = [path for path in found if path.is_symlink() or not (path.is_file() or path.is_dir())]
    num_bytes = sum(path.lstat().st_size for path in found if path.is_file())
    if odd or num_bytes > FREE_BYTES + MAX_RATIO * len(data):
        wrong = f"it unpacked {odd}, {num_bytes} bytes"
    return end, wrong


def _zip(maker: Random, members: dict[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")  # the same name twice
        for name, content in members.items():
            how = maker.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            archive.writestr(name, content, how)
        for _ in range(maker.choice((0, 0, 1, 1, 3))):
            info = zipfile.ZipInfo(maker.choice(_NAMES).replace("\0", "z") or "z")
            info.external_attr = (maker.choice(_MODES) | 0o7777) << 16
            archive.writestr(info, maker.choice((b"", b"../x", b"/etc/passwd", b"x" * 1000)))
        if maker.random() < 0.02:
            archive.writestr("bomb", bytes(80 << 20), zipfile.ZIP_DEFLATED)
    return _with_other_fields(maker, file.getvalue()) if maker.random() < 0.4 else file.getvalue()


def _with_other_fields(maker: Random, data: bytes) -> bytes:
    """Overwrite a field of a header: flags, method, sizes, offsets, lengths (APPNOTE.TXT, 4.3)."""
    changed = bytearray(data)
    for _ in range(maker.choice((1, 1, 2))):
        mark, fields = maker.choice(_HEADERS)
        places = [place for place in range(len(data)) if data.startswith(mark, place)]
        if places:
            offset, size = maker.choice(fields)
            place = maker.choice(places) + offset
            value = maker.choice((0, 1, 2**16 - 1, 2**31, 2**32 - 1, maker.randrange(5000)))
            changed[place : place + size] = (value % 256**size).to_bytes(size, "little")
    return bytes(changed)


def _tar(maker: Random, members: dict[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    form = maker.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(f"toy/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for _ in range(maker.choice((0, 0, 1, 1, 3))):
            info = tarfile.TarInfo(
                maker.choice(("", "toy/", "./", "../")) + maker.choice(_NAMES)[:90]
            )
            info.type = maker.choice(_TYPES)
            info.linkname = maker.choice(("/etc/passwd", "../../x", "handler.py"))
            try:
                archive.addfile(info)
            except (ValueError, UnicodeError):
                continue
    data = file.getvalue()
    if maker.random() < 0.3:
        data = mutate(maker, data, [data])
    return gzip.compress(data, 1)


def main(num: int, seed: int) -> int:
    """Try archives, print what must not happen, and return the number of such."""
    ends: Counter[str] = Counter()
    wrong = 0
    for number in range(num):
        folder = Path(tempfile.mkdtemp(prefix="fuzz-archive-"))
        try:
            data = make_archive(seed, number)
            end, complaint = complaint_about(data, folder)
        finally:
            os.chmod(folder, 0o700)
            shutil.rmtree(folder)
        ends[end] += 1
        if complaint:
            wrong += 1
            sys.stdout.write(f"{number}: {complaint}\n")
    sys.stdout.write(f"{num:,} archives: {dict(ends)}; {wrong} offences\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0) > 0)
