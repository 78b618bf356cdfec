"""The verbs of the command `inferpool`, from `serve` to `version`."""

import contextlib
import difflib
import errno
import io
import os
import platform
import re
import signal
import sys
from argparse import (
    SUPPRESS,
    ArgumentParser,
    HelpFormatter,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from service.settings import Settings
    from service.settings_loader import Loaded

CANNOT_START = 1
"""The exit status where this machine has no room for the service."""
FOUND_ERRORS = 1
"""The exit status where `doctor` found something that will not work."""
USAGE_ERROR = 2
"""The exit status for a wrong command line or wrong settings."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it (128 + SIGINT)."""

_EXAMPLES = """\
examples:
  inferpool serve                              the packaged image classifier
  inferpool serve torchvision:resnet50         a network of torchvision
  inferpool serve minilm_l6                    texts to vectors
  inferpool serve my_package.nets:MyModel      a class of your own
  inferpool serve exported.pt2 --replicas 2    a torch.export archive, in two processes
  inferpool predict photo.jpg                  ask a running service
  inferpool top                                what a service does, live
  inferpool doctor                             what would go wrong here, and what to do
  inferpool tune torchvision:resnet50          measure which settings are best here
  inferpool config                             every setting in force, and who set it
  inferpool config --describe                  every setting there is, and what it means
  inferpool chaos echo                         see a service keep its word while workers die
"""
_SETTINGS = """\
MODEL is a source (efficientnet_lite0, minilm_l6, echo, torchvision:NAME, encoder:FOLDER,
package.module:Class, or a .pt2 or TorchScript file) or the name of a model in the settings. Without
it, every model of the settings is served, or efficientnet_lite0 where there is none.

Settings come from inferpool.toml in this directory (or --config, or INFERPOOL_CONFIG); variables
such as INFERPOOL_PORT=9000 or INFERPOOL_MODELS__RESNET__REPLICAS=2 go over the file, and flags
over both. `inferpool config` lists them all.
"""


def run(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status.

    Args:
        argv: The arguments after the command's name; by default those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser, verbs = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    if argv[0] == "--version":
        argv = ["version", *argv[1:]]
    if not argv[0].startswith("-") and argv[0] not in verbs:
        parser.error(f"there is no verb {argv[0]!r}; {_nearest(argv[0], list(verbs))}")
    args, rest = parser.parse_known_args(argv)
    if rest:
        if argv[0] not in verbs:
            parser.error(f"{argv[0]}: flags come after the verb, as in `inferpool serve --port 80`")
        verbs[argv[0]].error(_unrecognised(rest[0], verbs[argv[0]]))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names and labels may be of any alphabet
    try:
        status: int = args.verb(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


class _Parser(ArgumentParser):
    """Writes its complaints on two lines, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


class _Formatter(RawDescriptionHelpFormatter):
    """Wraps what is one paragraph, and leaves lines that were broken as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return HelpFormatter._fill_text(self, text, width, indent)


def _parser() -> tuple[_Parser, Mapping[str, ArgumentParser]]:
    """The parser, and those of its verbs."""
    parser = _Parser(
        prog="inferpool",
        description="Serve PyTorch models over HTTP from a pool of worker processes.",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    flags = _settings_flags()
    from service.chaos.plan import add_flags as add_chaos_flags
    from service.cli_predict import add_flags as add_predict_flags
    from service.top.plan import add_flags as add_top_flags
    from service.tune.plan import add_flags as add_tune_flags

    serve = verbs.add_parser(
        "serve",
        help="serve models until told to stop",
        description="Serve models over HTTP until SIGTERM or Ctrl-C.",
        epilog=_SETTINGS,
        parents=[flags],
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    serve.set_defaults(verb=_serve)
    predict = verbs.add_parser(
        "predict",
        help="ask a running service for predictions",
        description="Ask a running service for predictions on files or texts, and print them in "
        "order. Exit status: 0 if there was one for each, 1 if not, 2 for wrong arguments.",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add_predict_flags(predict)
    predict.set_defaults(verb=_predict)
    top = verbs.add_parser(
        "top",
        help="show what a service does, live",
        description="Show throughput, latency, queue and workers of a service, second by second. "
        "Exit status: 0 once it has been shown, 1 if there is nothing to show, 2 for wrong "
        "arguments, 130 after Ctrl-C.",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add_top_flags(top)
    top.set_defaults(verb=_top)
    config = verbs.add_parser(
        "config",
        help="print every setting in force, and who set it",
        description="Print the settings that `inferpool serve` with the same arguments would have.",
        epilog=_SETTINGS,
        parents=[flags],
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    config.add_argument(
        "--format",
        choices=("table", "toml", "json", "markdown"),
        default="table",
        help="toml can be saved as inferpool.toml; markdown is for --describe (default: table)",
    )
    config.add_argument(
        "--describe",
        action="store_true",
        help="list every setting that there is, its default and what it means, instead",
    )
    config.set_defaults(verb=_config)
    doctor = verbs.add_parser(
        "doctor",
        help="say what on this machine would go wrong, and what to do",
        description="Look at this machine and at the settings that `inferpool serve` with the same "
        "arguments would have. The exit status is 1 if something will not work.",
        epilog=_SETTINGS,
        parents=[flags],
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    doctor.add_argument(
        "--measure",
        action="store_true",
        help="load each model once, and measure its memory, its start and a prediction",
    )
    doctor.add_argument(
        "--format", choices=("table", "json"), default="table", help="default: table"
    )
    doctor.set_defaults(verb=_doctor)
    tune = verbs.add_parser(
        "tune",
        help="measure which settings serve a model best here, and write them to a file",
        description="Start services of its own with settings that differ, load them in turns, and "
        "write the best settings to a file. Exit status: 0 if that was done, 1 if the file could "
        "not be written, 2 for wrong arguments, 3 if nothing could be measured, 130 after Ctrl-C, "
        "which prints what was found until then and writes no settings.",
        epilog=_SETTINGS,
        parents=[flags],
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add_tune_flags(tune)
    tune.set_defaults(verb=_tune)
    chaos = verbs.add_parser(
        "chaos",
        help="kill workers of a service under load, and see whether it keeps its word",
        description="Start a service of its own, load it with numbered requests whose right "
        "answers are known, and SIGKILL, SIGSTOP and poison its workers meanwhile. Exit status: 0 "
        "if each request had exactly one right answer, 1 if not, 3 if nothing could be tested.",
        epilog=_SETTINGS,
        parents=[flags],
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add_chaos_flags(chaos)
    chaos.set_defaults(verb=_chaos)
    about = verbs.add_parser(
        "version",
        help="print the versions of inferpool, Python and torch",
        description="Print the versions of inferpool and of what it stands on.",
        allow_abbrev=False,
    )
    about.set_defaults(verb=_version)
    return parser, {
        "serve": serve,
        "predict": predict,
        "top": top,
        "config": config,
        "doctor": doctor,
        "tune": tune,
        "chaos": chaos,
        "version": about,
    }


def _settings_flags() -> _Parser:
    """The arguments that `serve` and `config` share: all text, which `settings_loader` checks."""
    parser = _Parser(add_help=False, argument_default=SUPPRESS)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve; see below")
    parser.add_argument("--config", metavar="PATH", help="a TOML file of settings")
    parser.add_argument("--host", metavar="ADDRESS", help="listen there (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="N", help="and on this TCP port (default: 8000)")
    parser.add_argument(
        "--front-ends", metavar="N", help='processes that take calls there (default: "auto")'
    )
    access = parser.add_argument_group("access")
    for kind, what in (("predict", "predictions"), ("metrics", "metrics"), ("admin", "/admin")):
        access.add_argument(
            f"--{kind}-keys-file", metavar="PATH", help=f"API keys for {what}, one to a line"
        )
    access.add_argument(
        "--cors-origins", metavar="ORIGINS", help='pages that may ask, such as "https://a.example"'
    )
    access.add_argument("--tls-certificate", metavar="PATH", help="serve HTTPS with this PEM file")
    access.add_argument("--tls-key", metavar="PATH", help="and its private key, if not in it")
    models = parser.add_argument_group("models")
    models.add_argument("--replicas", metavar="N", help='copies of each model, or "auto"')
    models.add_argument(
        "--devices", metavar="WHERE", help='"auto", "cpu", "cuda", or GPUs such as "cuda:0,1"'
    )
    models.add_argument(
        "--placement", metavar="HOW", help='"replicate", or split as "pipeline" or "tensor"'
    )
    models.add_argument(
        "--devices-per-replica", metavar="N", help="devices that each copy is split over"
    )
    models.add_argument(
        "--gpu-memory-fraction", metavar="X", help="of its GPU's memory, the most a process takes"
    )
    models.add_argument("--weights", metavar="WHICH", help='"DEFAULT", "none", a name or a file')
    models.add_argument("--max-batch-size", metavar="N", help="instances per forward pass")
    models.add_argument(
        "--objective-p99-ms",
        metavar="MS",
        help="answer 99 of 100 within it, refuse the rest",
    )
    models.add_argument("--speed", metavar="HOW", help='"auto", "exact" or a preset\'s name')
    models.add_argument("--decode", metavar="HOW", help="auto, exact or fast")
    logs = parser.add_argument_group("logs")
    logs.add_argument("--log-format", metavar="HOW", help="auto, human or json")
    logs.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    return parser


def _unrecognised(word: str, parser: ArgumentParser) -> str:
    if not word.startswith("-"):
        usage = parser.format_usage()
        if "[MODEL]" not in usage:
            hint = " A service is named by --url" if "--url" in usage else ""
            return f"what is {word!r}?{hint}"
        return f"one MODEL at most; what is {word!r}? Several models are served from a file"
    flag = word.partition("=")[0]
    known = re.findall(r"--[a-z0-9-]+", parser.format_help())
    return f"there is no flag {flag}; {_nearest(flag, sorted(set(known)))}"


def _nearest(word: str, candidates: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, candidates, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(candidates)}"


def _load(args: Namespace) -> "Loaded | None":
    """The settings, or None once stderr has been told what is wrong with them."""
    from service.settings_loader import SettingsError, load

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
    from multiprocessing import resource_tracker

    from service.logs import is_json
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
            # First, since it lets Ctrl-C through once it has started.
            resource_tracker.ensure_running()
            # What we start inherits this and is deaf to Ctrl-C at once: it is for us to end it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            start_forkserver(loaded.settings.preload())  # it imports torch while we import the rest
        except OSError as error:
            stack.close()
            sys.stderr.write(f"inferpool: workers cannot be started: {error}{_cure(error)}\n")
            return CANNOT_START
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        from service.app import run as run_app

        return run_app(loaded.settings, loaded.origins, raw)


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
    is_about_files = error.errno not in cures and error.errno != errno.ENOMEM
    folder = "; set TMPDIR to a folder of a short name with some room, which can be written to"
    return folder if is_about_files else cures.get(error.errno or 0, "")


def _config(args: Namespace) -> int:
    if args.describe != (args.format == "markdown") and args.format in ("toml", "markdown"):
        only = "the settings in force" if args.format == "toml" else "the list of all: --describe"
        sys.stderr.write(f"inferpool config: --format {args.format} is for {only}\n")
        return USAGE_ERROR
    if args.describe:
        from service import cli_describe as describe

        write_all = {"table": describe.write_text, "markdown": describe.write_markdown}
        write_all.get(args.format, describe.write_json)(describe.all_settings(), sys.stdout)
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
    from service.settings_loader import secret_variables
    from workers.devices import find_host

    for name in secret_variables(os.environ):  # as when it serves
        del os.environ[name]
    settings = loaded.settings
    host = find_host(settings.cuda_visible_devices)
    findings = list(diagnose(settings, host, loaded.origins, is_measured=args.measure))
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
    from service.settings import version_of

    lines = [f"inferpool {version_of()}", f"Python {platform.python_version()}"]
    lines += [f"{name} {version_of(name)}" for name in ("torch", "torchvision")]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
