"""The flags of the command `inferpool`, and what is said of a wrong command line.

Imported for every verb, so it imports little.
"""

import difflib
import re
from argparse import (
    SUPPRESS,
    ArgumentParser,
    HelpFormatter,
    RawDescriptionHelpFormatter,
)
from collections.abc import Mapping, Sequence
from typing import NoReturn

ALL_SETTINGS = ("all",)
"""What `--describe` is without a name; no name that one could type."""
USAGE_ERROR = 2
"""The exit status for a wrong command line or wrong settings."""

_EXAMPLES = """\
examples:
  inferpool serve                              the packaged image classifier
  inferpool serve torchvision:resnet50         a network of torchvision
  inferpool serve minilm_l6                    texts to vectors
  inferpool serve my_package.nets:MyModel      a class of your own
  inferpool serve my_nets:MyModel --debug      the same in one process, with breakpoint()
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


def make_parser() -> tuple[ArgumentParser, Mapping[str, ArgumentParser]]:
    """The parser, and those of its verbs."""
    parser = _Parser(
        prog="inferpool",
        description="Serve PyTorch models over HTTP from a pool of worker processes.",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    flags = _settings_flags()
    from service.chaos.plan import add_flags as add_chaos_flags
    from service.cli_predict import add_flags as add_predict_flags
    from service.top.plan import add_flags as add_top_flags
    from service.tune.plan import add_flags as add_tune_flags

    serve = verbs.add_parser(
        "serve",
        help="serve models until told to stop",
        description="Serve models over HTTP until SIGTERM, SIGHUP or Ctrl-C. "
        "SIGQUIT writes to the log what all threads do.",
        epilog=_SETTINGS,
        parents=[flags],
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    serve.add_argument(
        "--debug",
        action="store_true",
        help="serve one model in this process alone: breakpoint() works, answers have tracebacks",
    )
    serve.add_argument(
        "--reload", action="store_true", help="with --debug: start anew when a file changes"
    )
    predict = verbs.add_parser(
        "predict",
        help="ask a running service for predictions",
        description="Ask a running service for predictions on files or texts, and print them in "
        "order. Exit status: 0 if there was one for each, 1 if not, 2 for wrong arguments.",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add_predict_flags(predict)
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
    _add_json_flag(config)
    config.add_argument(
        "--describe",
        nargs="?",
        const=ALL_SETTINGS,
        metavar="KEY",
        help="say what this setting means, its default and how to set it; without KEY, of all",
    )
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
        help="load each model, and measure its memory, its start, a prediction, and how fast each "
        "placement is that fits",
    )
    doctor.add_argument("--format", choices=("table", "json"), default="table", help=SUPPRESS)
    _add_json_flag(doctor)
    tune = verbs.add_parser(
        "tune",
        help="measure which settings serve a model best here, and write them to a file",
        description="Start services of its own with settings that differ, load them in turns, and "
        "write the best settings to a file. Exit status: 0 if that was done, 1 if the file could "
        "not be written, 2 for wrong arguments, 3 if nothing could be measured or --budget is too "
        "short to try anything, and then no file is written, 130 after Ctrl-C, "
        "which prints what was found until then and writes no settings.",
        epilog=_SETTINGS,
        parents=[flags],
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add_tune_flags(tune)
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
    about = verbs.add_parser(
        "version",
        help="print the versions of inferpool, Python and torch",
        description="Print the versions of inferpool and of what it stands on.",
        allow_abbrev=False,
    )
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


def _add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, which a verb with several formats has as one of them."""
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="print JSON"
    )


def unrecognised(word: str, parser: ArgumentParser) -> str:
    """What to say of a word that a verb does not know."""
    if not word.startswith("-"):
        usage = parser.format_usage()
        if "[MODEL]" not in usage:
            hint = " A service is named by --url" if "--url" in usage else ""
            return f"what is {word!r}?{hint}"
        return f"one MODEL at most; what is {word!r}? Several models are served from a file"
    flag = word.partition("=")[0]
    known = re.findall(r"--[a-z0-9-]+", parser.format_help())
    return f"there is no flag {flag}; {nearest(flag, sorted(set(known)))}"


def nearest(word: str, candidates: Sequence[str]) -> str:
    """Which of the words there are was meant, or else all of them."""
    near = difflib.get_close_matches(word, candidates, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(candidates)}"


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
