"""The verbs of the command `inferpool`, from `serve` to `version`."""

import contextlib
import errno
import io
import os
import platform
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli_parser import USAGE_ERROR, make_parser, nearest, unrecognised

if TYPE_CHECKING:
    from service.settings import Settings
    from service.settings_loader import Loaded

CANNOT_START = 1
"""The exit status where this machine has no room for the service."""
FOUND_ERRORS = 1
"""The exit status where `doctor` found something that will not work."""
OUTPUT_LOST = 1
"""The exit status where what was to be said could not be written to stdout."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it (128 + SIGINT)."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What an output fails of whose disk is full or gone."""


def run(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status.

    Args:
        argv: The arguments after the command's name; by default those of this process.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started us has closed it
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names and labels may be of any alphabet
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output left, as `head` does
        _give_output_up()
        return OUTPUT_LOST
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _give_output_up()
        sys.stderr.write(f"inferpool: the output cannot be written: {error.strerror}\n")
        return OUTPUT_LOST
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(argv: Sequence[str]) -> int:
    parser, verbs = make_parser()
    if not argv:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    if argv[0] == "--version":
        argv = ["version", *argv[1:]]
    if not argv[0].startswith("-") and argv[0] not in verbs:
        parser.error(f"there is no verb {argv[0]!r}; {nearest(argv[0], list(verbs))}")
    args, rest = parser.parse_known_args(argv)
    if rest:
        if argv[0] not in verbs:
            parser.error(f"{argv[0]}: flags come after the verb, as in `inferpool serve --port 80`")
        verbs[argv[0]].error(unrecognised(rest[0], verbs[argv[0]]))
    try:
        return _VERBS[args.verb](args)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "service", "workers", "models"):
            raise
        sys.stderr.write(
            f"inferpool {args.verb}: {package} is not installed. Where there is only the client, "
            "version and predict work; `pip install .` in the clone installs the rest\n"
        )
        return CANNOT_START


def _give_output_up() -> None:
    """Let what waits go nowhere, or the interpreter would complain of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _load(args: Namespace) -> "Loaded | None":
    """The settings, or None once stderr has been told what is wrong with them."""
    from service.settings_loader import load
    from service.settings_words import SettingsError

    flags = {name: value for name, value in vars(args).items() if isinstance(value, str)}
    try:
        return load(flags, os.environ, Path.cwd())
    except SettingsError as error:
        sys.stderr.writelines(f"inferpool: {problem}\n" for problem in error.problems)
        return None


def _serve(args: Namespace) -> int:
    loaded = _load(args)
    if loaded is None:
        return USAGE_ERROR
    if problem := _tls_problem(loaded.settings):
        sys.stderr.write(f"inferpool: {problem}\n")
        return USAGE_ERROR
    if args.reload and not args.debug:
        sys.stderr.write("inferpool serve: --reload goes with --debug\n")
        return USAGE_ERROR
    if args.debug:
        from service.debugging import run as run_debugging

        return run_debugging(loaded, reloads=args.reload)
    import faulthandler
    from multiprocessing import resource_tracker

    from service.logs import is_json
    from service.preload import modules_to_preload
    from service.raw_output import RawOutput
    from service.settings_loader import secret_variables
    from workers.local import start_forkserver

    for name in secret_variables(os.environ):  # so that model code cannot read them there
        del os.environ[name]
    # CUDA reads this in the workers, wherever we were told.
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = loaded.settings.cuda_mps_pipe_directory
    with contextlib.ExitStack() as stack:
        raw = None
        try:
            if is_json(loaded.settings.log_format, sys.stderr):
                # Before anything is started that could write there.
                raw = RawOutput.take()
                stack.callback(raw.close)
            faulthandler.register(signal.SIGQUIT, 2, chain=False)  # it goes on afterwards
            # First, since it lets Ctrl-C through once it has started.
            resource_tracker.ensure_running()
            # What we start inherits this and is deaf to Ctrl-C at once: it is for us to end it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # It imports torch while we import the rest.
            start_forkserver(modules_to_preload(loaded.settings.sources(), Path.cwd()))
        except OSError as error:
            stack.close()
            sys.stderr.write(f"inferpool: workers cannot be started: {error}{_cure(error)}\n")
            return CANNOT_START
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        from service.app import run as run_app

        return run_app(loaded.settings, loaded.origins, raw, loaded.warnings)


def _predict(args: Namespace) -> int:
    from service.cli_address import FlagError
    from service.cli_predict import run as run_predict

    try:
        return run_predict(args, os.environ)
    except FlagError as error:
        sys.stderr.write(f"inferpool predict: {error}\n")
        return USAGE_ERROR


def _top(args: Namespace) -> int:
    from service.cli_address import FlagError
    from service.top.plan import plan_of

    try:
        plan = plan_of(args, os.environ)
    except FlagError as error:
        sys.stderr.write(f"inferpool top: {error}\n")
        return USAGE_ERROR
    from service.top.run import run as run_top

    return run_top(plan)


def _tls_problem(settings: "Settings") -> str:
    """Why HTTPS cannot be served, if so: better said before torch is imported than after."""
    if settings.tls_certificate is None:
        return ""
    from service.tls import TlsError, server_context

    try:
        server_context(settings.tls_certificate, settings.tls_key)
    except TlsError as error:
        return str(error)
    return ""


def _cure(error: OSError) -> str:
    """What may help against an error of starting a process."""
    cures = {
        errno.EAGAIN: "; raise the limit of processes (ulimit -u, or the container's pids limit)",
        errno.EMFILE: "; raise the limit of descriptors (ulimit -n)",
    }
    return cures.get(error.errno or 0, "")


def _config(args: Namespace) -> int:
    if bool(args.describe) != (args.format == "markdown") and args.format in ("toml", "markdown"):
        only = "the settings in force" if args.format == "toml" else "the list of all: --describe"
        sys.stderr.write(f"inferpool config: --format {args.format} is for {only}\n")
        return USAGE_ERROR
    if args.describe:
        from service import cli_describe as describe

        write_all = {"table": describe.write_text, "markdown": describe.write_markdown}
        try:
            settings = describe.settings_of(args.describe)
        except KeyError as error:
            sys.stderr.write(f"inferpool config: --describe: {error.args[0]}\n")
            return USAGE_ERROR
        write_all.get(args.format, describe.write_json)(settings, sys.stdout)
        return 0
    loaded = _load(args)
    if loaded is None:
        return USAGE_ERROR
    from service import cli_config

    write = {"table": cli_config.write_table, "toml": cli_config.write_toml}
    write.get(args.format, cli_config.write_json)(loaded.rows(), sys.stdout)
    return 0


def _doctor(args: Namespace) -> int:
    loaded = _load(args)
    if loaded is None:
        return USAGE_ERROR
    from service.doctor import report
    from service.doctor.diagnosis import diagnose
    from service.doctor.findings import grouped
    from service.settings_loader import secret_variables
    from service.trial.screen import Screen
    from workers.devices import find_host

    for name in secret_variables(os.environ):  # as when it serves
        del os.environ[name]
    settings = loaded.settings
    with Screen(sys.stderr, "looking at this machine and these models") as screen:
        race = None
        if args.measure:
            from service.tune.race import PlacementRace

            race = PlacementRace(loaded, screen)
        host = find_host(settings.cuda_visible_devices)
        found = diagnose(settings, host, loaded.origins, race)
        findings = grouped(found, settings.models)
    write = report.write_json if args.format == "json" else report.write_table
    write(findings, sys.stdout)
    return FOUND_ERRORS if any(finding.level == "error" for finding in findings) else 0


def _chaos(args: Namespace) -> int:
    loaded = _load(args)
    if loaded is None:
        return USAGE_ERROR
    from service.chaos.plan import plan_of
    from service.chaos.run import run as run_chaos

    return run_chaos(loaded, plan_of(args))


def _tune(args: Namespace) -> int:
    from service.tune.plan import plan_of, problem_with

    plan = plan_of(args)
    if problem := problem_with(plan, may_replace=args.force):
        sys.stderr.write(f"inferpool tune: {problem}\n")
        return USAGE_ERROR
    loaded = _load(args)
    if loaded is None:
        return USAGE_ERROR
    names = list(loaded.settings.models)
    if len(names) > 1:
        sys.stderr.write(
            f"inferpool tune: which of the models? inferpool tune {' | '.join(names)}\n"
        )
        return USAGE_ERROR
    own = {name: value for name, value in vars(args).items() if name == "config"}
    whole = _load(Namespace(**own))  # MODEL leaves the other models out: the file is to keep them
    if whole is None:
        return USAGE_ERROR
    from service.tune.run import run as run_tune

    return run_tune(loaded, whole, plan)


def _version(_: Namespace) -> int:
    from service.versions import version_of

    lines = [f"inferpool {version_of()}", f"Python {platform.python_version()}"]
    for name in ("torch", "torchvision"):
        found = version_of(name)
        lines.append(f"{name} {'is not installed' if found == 'unknown' else found}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


_VERBS: Mapping[str, Callable[[Namespace], int]] = {
    "serve": _serve,
    "predict": _predict,
    "top": _top,
    "config": _config,
    "doctor": _doctor,
    "chaos": _chaos,
    "tune": _tune,
    "version": _version,
}
