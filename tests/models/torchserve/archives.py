"""Makes archives as torch-model-archiver does, without it."""

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

HANDLER = "def handle(data, context):\n    return ['ok'] * len(data or [])\n"


def manifest_of(name: str = "toy", **fields: object) -> bytes:
    model = {"modelName": name, "modelVersion": "1.0", "handler": "handler.py", **fields}
    return json.dumps({"runtime": "python", "model": model, "archiverVersion": "0.12.0"}).encode()


def files_of(
    name: str = "toy", files: Mapping[str, str | bytes] | None = None, **fields: object
) -> dict[str, str | bytes]:
    return {
        "handler.py": HANDLER,
        **(files or {}),
        "MAR-INF/MANIFEST.json": manifest_of(name, **fields),
    }


def make_mar(
    path: Path, files: Mapping[str, str | bytes] | None = None, name: str = "toy", **fields: object
) -> Path:
    """Write a `.mar`, with a handler of its own that answers "ok"."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in files_of(name, files, **fields).items():
            archive.writestr(member, content)
    return path


def make_tar(path: Path, files: Mapping[str, str | bytes] | None = None, **fields: object) -> Path:
    """Write a `.tar.gz`, in which all files lie in one folder."""
    with tarfile.open(path, "w:gz") as archive:
        for member, content in files_of("toy", files, **fields).items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(f"toy/{member}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def make_folder(folder: Path, **fields: object) -> Path:
    """Write an archive that is a folder."""
    for member, content in files_of("toy", None, **fields).items():
        path = folder / member
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
