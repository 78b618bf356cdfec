"""`inferpool.serve`: a service for a script, a notebook or a test, in a process of its own.

A thread starts it like `inferpool serve`, and lives as long as the service. The kernel ends the
service when that thread ends, and so when this process ends in any way.
"""

import atexit
import contextlib
import logging
import os
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path

from inferpool.models.sources.importing import end_import_for_model
from inferpool.service.client.errors import InferpoolError
from inferpool.service.client.keys import first_key
from inferpool.service.client.sync_client import Client
from inferpool.service.embedded.arguments import ServedModels, read_arguments
from inferpool.service.embedded.source import FoundSource
from inferpool.service.errors import StartError
from inferpool.service.settings.loader import LoadedSettings, Row, write_toml
from inferpool.service.settings.names import KEY_SETTINGS, PREFIX
from inferpool.service.tools.trial.bound import bound_command
from inferpool.service.tools.trial.processes import Family, LogReader, LogRecord

_LOOK_S = 0.02
_LEAVE_S = 15.0
"""How long a service may take to end, beyond the time of its settings for clients and workers."""
_LAST_LINES_S = 2.0
_LEVELS = logging.getLevelNamesMapping()
_OWN_KEYS = ("predict_keys", "metrics_keys")


def serve(
    models: ServedModels | None = None,
    /,
    *,
    config: str | os.PathLike[str] | None = None,
    ready_timeout_s: float = 120.0,
    **settings: object,
) -> "RunningService":
    """Start a service and return once each of its workers is ready. Any thread may call it.

    >>> with inferpool.serve(MyModel, replicas=2) as service:
    ...     print(service.client.predict([1, 2, 3]).value)

    The service is another process. It ends with the block, and with this process, in whatever way
    that ends. It logs to `logging` here. The worker processes import a class from its module, or
    from the running script, up to the call of `serve`.

    Args:
        models: A class, or a source such as "my_nets:MyModel" or "torchvision:resnet18"; or several
            by name, each a class, a source, or a dict of its settings. By default what `config`
            says, or else the packaged classifier.
        config: A file of settings. By default no file is read. Variables such as INFERPOOL_PORT are
            never read.
        ready_timeout_s: How long the workers may take to become ready.
        **settings: Any setting by its name. Those of a model apply to each model. By default the
            service listens on 127.0.0.1, on a free port.

    Raises:
        SettingsError: A setting is unknown or invalid.
        SourceError: Worker processes cannot import the class.
        StartError: The service did not come up in time, or a model could not be loaded.
    """
    end_import_for_model()
    if config is None:
        settings = {"port": 0, **settings}
    loaded, found = read_arguments(models, config, settings)
    service = RunningService(loaded, found, _keys(settings))
    service.start(ready_timeout_s)
    return service


class RunningService:
    """A service that this process has started. As a context manager it closes at the end."""

    url: str
    """The address of the service."""
    client: Client
    """A client of the service. Any thread may use it."""

    def __init__(
        self, loaded: LoadedSettings, found: Sequence[FoundSource], keys: Mapping[str, str]
    ) -> None:
        self._settings = loaded.settings
        self._rows = [row for row in loaded.rows() if row[2] != "default" or row[0][-1] == "source"]
        self._found = found
        self._keys = keys
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._said = LogReader()
        self._has_begun = threading.Event()
        self._closing = threading.Lock()
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="inferpool service", daemon=True)
        self.url = ""

    def start(self, ready_timeout_s: float) -> None:
        """Start the service, and wait until its workers are ready.

        Raises:
            StartError: It did not come up.
        """
        try:
            self._thread.start()
            atexit.register(self.close)
            self._wait_until_ready(time.monotonic() + ready_timeout_s, ready_timeout_s)
        except BaseException:
            self._close(grace_s=0.0)
            raise

    def close(self) -> None:
        """Answer what was accepted, and leave nothing behind: no process, no file, no open port."""
        settings = self._settings
        self._close(settings.shutdown_delay_s + settings.drain_timeout_s + _LEAVE_S)

    def __enter__(self) -> "RunningService":
        """Return this service."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Show the address."""
        return f"RunningService({self.url!r}{', closed' if self._is_closed else ''})"

    def _close(self, grace_s: float) -> None:
        if os.getpid() != self._owner_pid:
            return  # a forked copy of this process ends
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            atexit.unregister(self.close)
            if self.url:
                self.client.close()
            if self._thread.ident is not None:
                self._has_begun.wait()  # its process may be about to start
            if self._process is not None:
                _end(self._process, grace_s)
            self._thread.join(_LAST_LINES_S)
            if self._folder is not None:
                self._folder.cleanup()

    def _wait_until_ready(self, until: float, timeout_s: float) -> None:
        if not self._has_begun.wait(timeout_s):
            raise self._too_late(timeout_s)
        if self._failure is not None:
            raise StartError(f"the service cannot be started: {self._failure}") from self._failure
        assert self._process is not None
        while not self._is_ready():
            if self._process.poll() is not None:
                self._thread.join(_LAST_LINES_S)
                code = self._process.returncode
                reason = self._said.last_words() or f"it ended with code {code}{self._said.tail()}"
                raise StartError(f"the service did not come up: {reason}")
            if time.monotonic() > until:
                raise self._too_late(timeout_s)
            time.sleep(_LOOK_S)

    def _too_late(self, timeout_s: float) -> StartError:
        tail = self._said.tail()
        return StartError(
            f"the service is not ready within {timeout_s:g} s (ready_timeout_s){tail}"
        )

    def _is_ready(self) -> bool:
        """Return whether all workers are ready.

        Raises:
            StartError: One never will be.
        """
        if not self.url:
            return False
        try:
            models = self.client.health().models
        except InferpoolError:
            return False
        workers = [worker for model in models for worker in model.workers]
        for worker in workers:
            if worker.state == "failed":
                raise StartError(f"the worker {worker.name} failed: {worker.reason}")
        return all(worker.state == "ready" for worker in workers)

    def _run(self) -> None:
        """Start the service, pass on its log, and wait for its end. Runs in the thread."""
        try:
            with contextlib.ExitStack() as stack:
                file = os.memfd_create("inferpool-settings")
                stack.callback(os.close, file)
                os.write(file, self._toml())
                self._process = subprocess.Popen(
                    bound_command(["serve", "--config", f"/proc/self/fd/{file}"]),
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C reaches only us, and we close the service
                    pass_fds=[file],
                )
        except OSError as error:
            self._failure = error
            return
        finally:
            self._has_begun.set()
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for line in log:
                self._take(self._said.take(line))
        self._process.wait()

    def _take(self, record: LogRecord) -> None:
        """Pass a line of its log to `logging`, unless the settings exclude such lines."""
        if record.url and not self.url:
            self.client = self._client_for(record.url)
            self.url = record.url
        level = _LEVELS.get(record.level.upper(), logging.WARNING)
        if level >= _LEVELS[self._settings.log_level.upper()]:
            text = "\n".join(filter(None, [record.message, record.exception]))
            place = "" if record.logger.startswith("inferpool.") else "inferpool."
            logging.getLogger(f"{place}{record.logger}").log(level, "%s", text)

    def _client_for(self, url: str) -> Client:
        certificate = self._settings.tls_certificate
        verify: bool | ssl.SSLContext = True
        if certificate is not None:
            verify = ssl.create_default_context(cafile=certificate)
            verify.check_hostname = False  # the certificate need not be one for 127.0.0.1
            verify.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        given = [self._keys[name] for name in _OWN_KEYS if name in self._keys]
        key = first_key(given[0]) if given else None
        return Client(url, key=key, verify=verify, proxy="")

    def _toml(self) -> bytes:
        """Return the settings as a file, without keys. `_take` filters the log."""
        level = "debug" if self._settings.log_level == "debug" else "info"
        own: list[Row] = [
            (("log_format",), "json", "serve"),
            (("log_level",), level, "serve"),
        ]
        left_out = {key for key, _, _ in own}
        rows = [*own, *(row for row in self._rows if row[0] not in left_out)]
        rows.sort(key=lambda row: len(row[0]) > 1)  # the tables of models come last
        text = StringIO()
        write_toml(rows, text)
        return text.getvalue().encode()

    def _environment(self) -> dict[str, str]:
        """Return our environment, with keys instead of settings, and the folders of modules."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
        for name, text in self._keys.items():
            kept[f"{PREFIX}{name.upper()}"] = text
        folders = [each.folder for each in self._found if each.folder]
        typed = [each for each in self._found if each.text]
        if typed:
            self._folder = tempfile.TemporaryDirectory(prefix="inferpool-typed-")
            folders.append(self._folder.name)
        for each in typed:
            module = each.source.partition(":")[0]
            Path(folders[-1], f"{module}.py").write_text(each.text, encoding="utf-8")
        kept["PYTHONPATH"] = _search_path([*sys.path, *folders])
        return kept


def _search_path(folders: Iterable[str]) -> str:
    """Return the folders where this process finds modules, each once; "" is the current one."""
    found = dict.fromkeys(os.path.abspath(folder) for folder in folders)
    return os.pathsep.join(each for each in found if os.pathsep not in each)


def _keys(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the keys as variables of the environment."""
    keys = {}
    for name in KEY_SETTINGS:
        given = settings.get(name)
        if isinstance(given, str):
            keys[name] = given
        elif isinstance(given, Sequence):
            keys[name] = ",".join(map(str, given))
    return keys


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Stop a service, and kill it if that takes too long."""
    family = Family(process)
    family.alive()
    try:
        if grace_s and process.poll() is None:
            process.terminate()
            process.wait(grace_s)
    except subprocess.TimeoutExpired:
        logging.getLogger("inferpool").error("the service did not stop in %g s: killed", grace_s)
    finally:  # also when Ctrl-C interrupts the wait
        family.kill()
        process.wait()
