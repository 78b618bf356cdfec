"""Flags of the verbs `serve`, `import`, `config`, `doctor` and `agent`, beside those of settings.

The parser of these verbs imports this, so it imports little.
"""

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

CLUSTER_KEY_VARIABLE = "INFERPOOL_CLUSTER_KEYS"
ALL_SETTINGS = ("all",)
"""Value of `--describe` without a name; it cannot be typed."""


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
    from inferpool.service.client.cli.flags import ADMIN_KEY_VARIABLE, add_access_flags

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


def add_import_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `import`."""
    parser.add_argument("archive", metavar="ARCHIVE", help="a .mar or .tar.gz file")
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="a new or empty folder for its files"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the folder of an archive imported before"
    )


def _add_json_flag(parser: ArgumentParser) -> None:
    """Add `--json`, a short form of `--format json`."""
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="print JSON"
    )


class AgentFlags:
    """The flags of `agent`: their names, defaults and help."""

    join: Annotated[str, "HOST:PORT"]
    """Cluster port of the front end; several with commas, of which one serves at a time."""
    name: Annotated[str | None, "NAME"] = None
    """Name of this host, unique in the cluster (default: its own)."""
    devices: Annotated[str, "WHERE"] = "auto"
    """Devices that it offers: `auto` (all GPUs and cores), `cpu`, or GPUs such as `cuda:0,1`."""
    arena_bytes: int | None = None
    """Shared memory for payloads (default: a tenth of the memory, 256 MiB at most)."""
    cache_dir: Annotated[str | None, "PATH"] = None
    """The folder of what is measured about speed, or `none` (default: ~/.cache/inferpool)."""
    drain_timeout_s: Annotated[float, "N"] = 30
    """How long workers may take to finish after SIGTERM or Ctrl-C."""
    once: bool = False
    """End when the front end refuses this host, or when the connection ends."""
    key_file: Path | None = None
    """Prove the first key in it (default: the first of INFERPOOL_CLUSTER_KEYS)."""
    certificate: Annotated[str | None, "PATH"] = None
    """Use TLS, and show this PEM file."""
    key: Annotated[str | None, "PATH"] = None
    """Its private key, if it is in another file."""
    authority: Annotated[str | None, "PATH"] = None
    """A PEM file with the authority that has signed the certificate of the front end."""
    insecure: bool = False
    """Do without TLS over an address that is not private."""
    log_format: Literal["auto", "human", "json"] = "auto"
    """The form of log lines, for people or for machines (default: for people on a terminal)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe log lines to write."""


def add_agent_flags(parser: ArgumentParser) -> None:
    """Add the flags of `agent`."""
    from inferpool.service.settings.fields import add_flags_of, fields_of  # not for other verbs

    fields = fields_of(__name__, AgentFlags.__name__)
    add_flags_of(parser, fields, {"key_file": "access", "log_format": "logs"})
