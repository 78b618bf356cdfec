"""The verb `import`: makes a folder that serves from an archive of TorchServe; runs none of it."""

import os
import shlex
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from inferpool.models.errors import SourceError
from inferpool.models.files.kinds import ARCHIVE_MANIFEST
from inferpool.models.texts import on_one_line
from inferpool.models.torchserve.archive import Archived, read_facts
from inferpool.models.torchserve.unpacking import unpack
from inferpool.service.client.texts import in_words
from inferpool.service.settings.archives import settings_of_archive
from inferpool.service.settings.names import FlagError

_FAILED = 1
_MOST_FILES = 20
"""Files to list; of more, only their number."""


def run(args: Namespace) -> int:
    """Unpack an archive; return the exit status.

    Raises:
        FlagError: The archive is no file here, or the folder is in use.
    """
    if "://" in args.archive:
        raise FlagError(f"{args.archive}: nothing is downloaded: give the path of a file")
    path, folder = Path(args.archive), Path(args.output)
    if path.is_dir():
        raise FlagError(f"{path} is a folder already: inferpool serve {shlex.quote(str(path))}")
    _check_free(folder, force=args.force)
    try:
        facts = read_facts(path)
        if os.path.lexists(folder) and any(folder.iterdir()):
            _replace(path, folder)
        else:
            unpack(path, folder)
    except (SourceError, OSError) as error:
        sys.stderr.write(f"inferpool import: {on_one_line(str(error))}\n")
        return _FAILED
    sys.stdout.writelines(f"{on_one_line(line)}\n" for line in _report(facts, folder))
    return 0


def _check_free(folder: Path, *, force: bool) -> None:
    """Check that a folder may be written.

    Raises:
        FlagError: It is in use.
    """
    if Path.cwd().is_relative_to(folder.resolve()):
        raise FlagError(f"--output {folder}: name a folder below this one, which it makes")
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise FlagError(f"--output {folder}: there is a file or link of this name")
    if not any(folder.iterdir()):
        return
    if not force:
        raise FlagError(f"--output {folder}: it is not empty; --force replaces an imported archive")
    if not (folder / ARCHIVE_MANIFEST).is_file():
        raise FlagError(
            f"--output {folder}: it holds no {ARCHIVE_MANIFEST}, so it is no imported archive, and "
            "--force does not delete it"
        )


def _replace(path: Path, folder: Path) -> None:
    """Unpack an archive beside a folder, and put it in its place."""
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    old = aside / "old"
    try:
        unpack(path, aside / "new")
        folder.rename(old)
        (aside / "new").rename(folder)
    finally:
        if not folder.exists() and old.exists():
            old.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)


def _report(facts: Archived, folder: Path) -> Iterator[str]:
    model = facts.model
    yield f"{facts.path} is an archive of TorchServe, which is code: its handler runs once it is"
    yield "served, with all rights of the user who serves it. Nothing of it has run yet. Serve only"
    yield "archives that you trust."
    yield ""
    yield f"name      {facts.name}, version {facts.version}"
    own = "" if model.handler_file is None else ", its own code"
    yield f"handler   {model.handler}{own}"
    if model.model_file:
        yield f"network   {model.model_file}, its own code"
    if model.serialized_file:
        yield f"weights   {model.serialized_file}"
    if model.config_file:
        numbers = ", ".join(f"{key} {value}" for key, value in facts.numbers.items())
        yield f"config    {model.config_file}{f': {numbers}' if numbers else ''}"
        if facts.unread:
            yield f"          not used: {', '.join(facts.unread)}"
    if found := settings_of_archive(facts):
        yield f"settings  {', '.join(f'{key} = {value}' for key, value in found.items())}"
    yield f"files     {len(facts.files)}, {in_words(facts.num_bytes)}"
    for name, num_bytes in [*facts.files.items()][:_MOST_FILES]:
        yield f"          {name}, {in_words(num_bytes)}"
    if len(facts.files) > _MOST_FILES:
        yield f"          and {len(facts.files) - _MOST_FILES} others"
    yield ""
    yield "Next:"
    if model.requirements_file:
        file = shlex.quote(str(folder / model.requirements_file))
        yield f"  pip install -r {file}    # it asks for these packages; none was installed"
    if model.config_file and find_spec("yaml") is None:
        yield "  pip install 'inferpool[torchserve]'    # reads its config"
    yield f"  inferpool serve {shlex.quote(str(folder))}"
