"""A folder in which the examples of the pages run one after another, as they would for a reader."""

import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import skimage.data
from PIL import Image

from inferpool.service.cli.main import INFERPOOL
from inferpool.service.settings.loader import load
from inferpool.service.settings.names import SettingsError
from tests.docs import command
from tests.docs.pages import LANGUAGES, ROOT, Block
from tests.docs.shapes import difference, printed
from tests.e2e import forked
from tests.ports import free_port

_BLOCK_S = 170.0
_PORT = re.compile(r"(?<![\w.,])(8000|808[0-2])\b")
_OUR_COMMAND = re.compile(r"(?:^|&&|\|\|?|;|\buv run)\s*inferpool\s+([^|;&<>\n]+)", re.MULTILINE)

_INSTALLED = """\
#!/bin/sh
# What is installed is the environment of the tests.
[ "$1" = run ] && shift && [ "$1" != pytest ] && exec "$@"  # pytest is what runs us
exit 0
"""
_NOTHING = "#!/bin/sh\nexit 0\n"
_STAND_IN = command.__name__
_KEPT = ("TMPDIR", "GOMP_SPINCOUNT")
"""Variables of the examples that are ours, beside those that interpreters read when they start."""
_REAL_PAGES = ("README.md",)
"""Pages on which `inferpool` and `python` start interpreters, and none is forked."""


class ExampleError(AssertionError):
    """An example does not do what its reader expects."""


class DocsStage:
    """Runs blocks. A context manager: leaving it ends the service that they started last."""

    def __init__(self, folder: Path) -> None:
        """Begin in a new folder, with the commands that the examples use."""
        self.folder = self._root = folder
        self._page = ""
        self._own = folder / "own"
        self._port = free_port()
        self._ports = {"8000": self._port, "8080": self._port}
        self._output: str | None = None
        """Output of the block before."""
        self._serving = ""
        self._interpreter: subprocess.Popen[str] | None = None
        self._set_up()

    def __enter__(self) -> "DocsStage":
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs."""
        command.stop(self._own)
        self._end_interpreter()

    def run(self, block: Block) -> None:
        """Do what a block says, or check that it could be done.

        Raises:
            ExampleError: It cannot be done, or something else came out than the page prints.
        """
        if block.page != self._page:
            self._turn_to(block.page)
        if block.language in ("sh", "bash"):
            _check_command_lines(block.text)
        if "not run" in block.marks:
            if not block.marks["not run"]:
                raise ExampleError("`not run` needs a reason")
            self._output = None
            return
        if block.language not in LANGUAGES and "file" not in block.marks:
            raise ExampleError(
                f"{block.language!r} cannot be run here; mark it: <!-- not run: WHY --> or "
                "<!-- file: PATH -->"
            )
        if (arguments := block.marks.get("serve", self._serving)) != self._serving:
            self._run_shell(f"inferpool serve {arguments}")
            self._serving = arguments
        text = _PORT.sub(self._free_port_for, block.text)
        before, self._output = self._output, None
        if path := block.marks.get("file"):
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        if block.language == "toml" and block.marks.get("file", "inferpool.toml").endswith(".toml"):
            self._check_settings(text)
        elif block.language == "json":
            _check_answer(before, text)
        elif "file" in block.marks:
            pass
        elif block.language == "python":
            self._output = self._run_python(text, block)
        else:
            self._output = self._run_shell(text)

    def _free_port_for(self, found: re.Match[str]) -> str:
        return str(self._ports.setdefault(found[0], free_port()))

    def _run_shell(self, text: str) -> str:
        if re.search(r"\binferpool serve\b", text):
            self._serving = ""
        variables, descriptors = self._start_of_python()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environ(variables),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_BLOCK_S,
        )
        if done.returncode:
            raise ExampleError(f"exit status {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _run_python(self, text: str, block: Block) -> str:
        if self._interpreter is None:
            start = subprocess.Popen if self._is_real else _fork_script
            self._interpreter = start(
                [sys.executable, "-m", "tests.docs.interpreter"],
                cwd=self.folder,
                env=self._environ(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._interpreter.stdin is not None
        assert self._interpreter.stdout is not None
        placed = "\n" * (block.line - 1) + text  # so that tracebacks name the page's lines
        self._interpreter.stdin.write(json.dumps({"text": placed, "name": block.page}) + "\n")
        self._interpreter.stdin.flush()
        answer = json.loads(self._interpreter.stdout.readline())
        if answer["error"]:
            raise ExampleError(answer["out"] + answer["error"])
        return str(answer["out"])

    def _check_settings(self, text: str) -> None:
        file = self._own / "checked.toml"
        file.write_text(text)
        try:
            load({"config": str(file)}, {}, self.folder)
        except SettingsError as error:
            raise ExampleError(f"these settings cannot be used: {error}") from None

    @property
    def _is_real(self) -> bool:
        """Return whether the commands of this page start interpreters, as those of its reader."""
        return self._page in _REAL_PAGES

    def _start_of_python(self) -> tuple[Mapping[str, str], Sequence[int]]:
        """Return variables and descriptors that say how `inferpool` and `python` start."""
        if self._is_real:
            return {command.REAL: str(Path(sys.executable).parent / "inferpool")}, ()
        return forked.shared()

    def _environ(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        binaries = [str(self._own / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            **forked.read_at_start(),
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PATH": os.pathsep.join(binaries),
            "HOME": str(self._own),
            "INFERPOOL_PORT": str(self._port),
            "INFERPOOL_SPEED_SEARCH": "false",
            command.FOLDER: str(self._own),
            **(variables or {}),
        }

    def _turn_to(self, page: str) -> None:
        """Go to a folder of the page's own, as its reader would begin.

        It is a copy of the page's folder for the projects in `docs/examples`. The service goes on.
        """
        self._end_interpreter()
        self._page, self._output = page, None
        self.folder = self._root / page.removesuffix(".md")
        if page.startswith("docs/examples/"):
            shutil.copytree((ROOT / page).parent, self.folder)
        else:
            self.folder.mkdir(parents=True)
        (self.folder / "photo.jpg").write_bytes(_photo())

    def _end_interpreter(self) -> None:
        if self._interpreter is not None:
            self._interpreter.communicate(timeout=60)
            self._interpreter = None

    def _set_up(self) -> None:
        binaries = self._own / "bin"
        binaries.mkdir(parents=True)
        scripts = {"uv": _INSTALLED, "pip": _NOTHING}
        for name in ("inferpool", "python", "pytest"):
            scripts[name] = f'#!/bin/sh\nexec "{sys.executable}" -P -m {_STAND_IN} {name} "$@"\n'
        for name, script in scripts.items():
            (binaries / name).write_text(script)
            (binaries / name).chmod(0o755)
        (self._own / ".curlrc").write_text("fail-with-body\nmax-time = 60\n")  # 4xx is a failure


def _fork_script(arguments: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    return forked.popen(arguments, num_forkservers=1, **options)


@functools.cache
def _photo() -> bytes:
    """Return the picture of a cat that the first page makes and the others use."""
    file = io.BytesIO()
    Image.fromarray(skimage.data.chelsea()).save(file, "JPEG")
    return file.getvalue()


def _check_command_lines(text: str) -> None:
    """Check that the parser knows each `inferpool ...` of a block, with its flags."""
    for found in _OUR_COMMAND.finditer(text.replace("\\\n", " ")):
        words = shlex.split(found[1], comments=True)
        parser, verbs = INFERPOOL.make_parser(words[0] if words else "")
        for action in [each for verb in verbs.values() for each in verb._actions]:
            action.type = None  # files that are named need not be there
        try:
            _, rest = parser.parse_known_args(words)
        except SystemExit as left:
            if left.code:
                raise ExampleError(f"inferpool {found[1]}: is no command line") from None
            continue
        if rest:
            raise ExampleError(f"inferpool {found[1]}: there is no {rest}")


def _check_answer(output: str | None, text: str) -> None:
    """Compare what the block before printed last with this one."""
    try:
        shown = printed(text)
    except json.JSONDecodeError as error:
        raise ExampleError(f"this is no JSON, even with what `...` leaves out: {error}") from None
    if output is None:
        return
    try:
        real = _last_json(output)
    except json.JSONDecodeError:
        raise ExampleError(f"the block before printed no JSON: {output!r}") from None
    if found := difference(shown, real):
        raise ExampleError(found)


def _last_json(output: str) -> object:
    try:
        return json.loads(output)
    except json.JSONDecodeError:
        return json.loads((output.strip().splitlines() or [""])[-1])
