"""Flags of the verbs that have no plan of their own, and MODEL with the flags of settings.

Imported whenever a verb's line is read, so it imports little.
"""

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping

from inferpool.service.settings.address import add_access_flags, add_url_flag

ALL_SETTINGS = ("all",)
"""What `--describe` is without a name; no name that one could type."""
PREDICT_KEY_VARIABLE = "INFERPOOL_PREDICT_KEYS"


def add_settings_flags(parser: ArgumentParser) -> None:
    """Add MODEL and the flags of settings: all text, which `settings_loader` checks."""
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


def settings_in(args: Namespace) -> Mapping[str, str]:
    """The settings that a command line gives, for `settings_loader.load`."""
    return {name: value for name, value in vars(args).items() if isinstance(value, str)}


def add_serve_flags(parser: ArgumentParser) -> None:
    """Add the flags of `serve` that are no settings."""
    parser.add_argument(
        "--debug",
        action="store_true",
        help="serve one model in this process alone: breakpoint() works, answers have tracebacks",
    )
    parser.add_argument(
        "--reload", action="store_true", help="with --debug: start anew when a file changes"
    )


def add_config_flags(parser: ArgumentParser) -> None:
    """Add the flags of `config` that are no settings."""
    parser.add_argument(
        "--format",
        choices=("table", "toml", "json", "markdown"),
        default="table",
        help="toml can be saved as inferpool.toml; markdown is for --describe (default: table)",
    )
    _add_json_flag(parser)
    parser.add_argument(
        "--describe",
        nargs="?",
        const=ALL_SETTINGS,
        metavar="KEY",
        help="say what this setting means, its default and how to set it; without KEY, of all",
    )


def add_doctor_flags(parser: ArgumentParser) -> None:
    """Add the flags of `doctor` that are no settings."""
    parser.add_argument(
        "--measure",
        action="store_true",
        help="load each model, and measure its memory, its start, a prediction, and how fast each "
        "placement is that fits",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help=SUPPRESS)
    _add_json_flag(parser)


def add_predict_flags(parser: ArgumentParser) -> None:
    """Add the flags of `predict`."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="FILE",
        help="an image, .npy, .safetensors, .json or .txt file, or - for standard input",
    )
    parser.add_argument(
        "--text", action="append", default=[], metavar="TEXT", help="a text; may be repeated"
    )
    add_url_flag(parser)
    parser.add_argument("--model", metavar="NAME", help="another model than the default one")
    parser.add_argument(
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for the model; the value is JSON or else a text; may be repeated",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=30.0, metavar="N", help="for each input (default: 30)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON for each input, with its timing"
    )
    add_access_flags(parser, "predictions", PREDICT_KEY_VARIABLE)


def _add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, which a verb with several formats has as one of them."""
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="print JSON"
    )
