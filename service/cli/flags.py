"""Flags of the verbs `serve`, `config` and `doctor`, and those of settings.

The parser of these verbs imports this, so it imports little.
"""

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping

from inferpool.service.client.cli.flags import ADMIN_KEY_VARIABLE, add_access_flags

ALL_SETTINGS = ("all",)
"""Value of `--describe` without a name; nobody can type it."""

_SETTINGS_FLAGS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "": {
        "config": ("PATH", "a TOML file of settings"),
        "host": ("ADDRESS", "address to listen on (default: 127.0.0.1)"),
        "port": ("N", "TCP port to listen on (default: 8000)"),
        "watch": ("FOLDER", "serve the models in a folder as they come and go"),
        "front-ends": ("N", 'processes that take requests (default: "auto")'),
        "job-store": ("PLACE", 'a folder or postgresql://… for jobs, or "none"'),
        "show-errors": ("", "show clients the texts of exceptions that a model raises"),
    },
    "access": {
        "predict-keys-file": ("PATH", "API keys for predictions, one per line"),
        "metrics-keys-file": ("PATH", "API keys for metrics, one per line"),
        "admin-keys-file": ("PATH", "API keys for /admin, one per line"),
        "cors-origins": ("ORIGINS", 'web pages that may ask, such as "https://a.example"'),
        "tls-certificate": ("PATH", "serve HTTPS with this PEM file"),
        "tls-key": ("PATH", "its private key, if it is in another file"),
        "root-path": ("PATH", 'the path that a proxy serves this under, such as "/models"'),
        "proxy-headers": ("", "use X-Forwarded-Proto, -Host and -Prefix of trusted proxies"),
        "forwarded-allow-ips": ("IPS", 'those proxies, such as "10.0.0.0/8" (default: none)'),
    },
    "cluster": {
        "cluster-port": ("N", "TCP port that agents join at: all models are computed there"),
        "cluster-host": ("ADDRESS", "address that agents join at (default: 127.0.0.1)"),
        "cluster-keys-file": ("PATH", "keys of which an agent must know one, one per line"),
        "cluster-certificate": ("PATH", "show agents this PEM file, and ask for theirs"),
        "cluster-key": ("PATH", "its private key, if it is in another file"),
        "cluster-authority": ("PATH", "who has signed the certificates of agents"),
        "standby-of": ("HOST:PORT", "take over from this front end when it is lost"),
    },
    "models": {
        "replicas": ("N", 'copies of each model, or "auto"'),
        "devices": ("WHERE", '"auto", "cpu", "cuda", or GPUs such as "cuda:0,1"'),
        "placement": ("HOW", '"replicate", or split as "pipeline" or "tensor"'),
        "devices-per-replica": ("N", "devices that each copy is split over"),
        "gpu-memory-fraction": ("X", "largest share of its GPU's memory for each process"),
        "weights": ("WHICH", '"DEFAULT", "none", a name or a file'),
        "max-batch-size": ("N", "instances per forward pass"),
        "objective-p99-ms": ("MS", "answer 99 of 100 within it, refuse the rest"),
        "check": ("HOW", 'check its example first: "on", "warn" or "off"'),
        "speed": ("HOW", '"auto", "exact" or a preset\'s name'),
        "decode": ("HOW", "auto, exact or fast"),
        "decoders": ("N", "processes that decode pictures for each worker"),
    },
    "logs": {
        "log-format": ("HOW", "auto, human or json"),
        "log-level": ("LEVEL", "debug, info, warning or error"),
    },
}
"""Flags of settings by the group in which --help shows them: each one's value, and its help.
Those without a value turn something on."""


def add_settings_flags(parser: ArgumentParser) -> None:
    """Add MODEL and the flags of settings. All are text; `settings.loader` checks them."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve; see below")
    for title, flags in _SETTINGS_FLAGS.items():
        group = parser.add_argument_group(title) if title else parser
        for name, (metavar, text) in flags.items():
            if metavar:
                group.add_argument(f"--{name}", metavar=metavar, help=text)
            else:
                group.add_argument(f"--{name}", action="store_const", const="true", help=text)


def settings_in(args: Namespace) -> Mapping[str, str]:
    """Return the settings on a command line, for `settings.loader.load`."""
    return {name: value for name, value in vars(args).items() if isinstance(value, str)}


def add_serve_flags(parser: ArgumentParser) -> None:
    """Add the flags of `serve` that are not settings."""
    parser.add_argument(
        "--debug",
        action="store_true",
        help="serve one model in this process: breakpoint() works, answers have tracebacks",
    )
    parser.add_argument(
        "--reload", action="store_true", help="with --debug: restart when a file changes"
    )


def add_config_flags(parser: ArgumentParser) -> None:
    """Add the flags of `config` that are not settings."""
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
        help="describe this setting, its default and how to set it; without KEY, describe all",
    )


def add_doctor_flags(parser: ArgumentParser) -> None:
    """Add the flags of `doctor` that are not settings."""
    parser.add_argument(
        "--measure",
        action="store_true",
        help="load each model; measure its memory, its start, a prediction, and the speed of each "
        "placement that fits",
    )
    parser.add_argument(
        "--cluster",
        metavar="URL",
        help="check the running cluster of this front end instead: its ports, versions, clocks and "
        "connections",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help=SUPPRESS)
    _add_json_flag(parser)
    add_access_flags(parser, "administration", ADMIN_KEY_VARIABLE)


def _add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, a short form of `--format json`."""
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="print JSON"
    )
