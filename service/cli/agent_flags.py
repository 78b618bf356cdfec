"""Flags of the verb `agent`. Its `--help` imports this, so it imports little."""

from argparse import ArgumentParser
from pathlib import Path

CLUSTER_KEY_VARIABLE = "INFERPOOL_CLUSTER_KEYS"


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of `agent`."""
    parser.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT",
        help="cluster port of the front end; several with commas, of which one serves at a time",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name of this host, unique in the cluster (default: its own)"
    )
    parser.add_argument(
        "--devices",
        default="auto",
        metavar="WHERE",
        help='what it offers: "auto" (all GPUs and cores), "cpu", or GPUs such as "cuda:0,1"',
    )
    parser.add_argument(
        "--arena-bytes",
        type=int,
        metavar="N",
        help="shared memory for payloads (default: a tenth of the memory, 256 MiB at most)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="PATH",
        help='folder of what is measured about speed, or "none" (default: ~/.cache/inferpool)',
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=float,
        default=30.0,
        metavar="N",
        help="how long workers may take to finish after SIGTERM or Ctrl-C (default: 30)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="end when the front end refuses this host, or when the connection ends",
    )
    access = parser.add_argument_group("access")
    access.add_argument(
        "--key-file",
        type=Path,
        metavar="PATH",
        help=f"prove the first key in it (default: the first of {CLUSTER_KEY_VARIABLE})",
    )
    access.add_argument("--certificate", metavar="PATH", help="use TLS, and show this PEM file")
    access.add_argument("--key", metavar="PATH", help="its private key, if in another file")
    access.add_argument(
        "--authority", metavar="PATH", help="who has signed the certificate of the front end"
    )
    access.add_argument(
        "--insecure",
        action="store_true",
        help="do without TLS over an address that is not private",
    )
    logs = parser.add_argument_group("logs")
    logs.add_argument(
        "--log-format",
        choices=("auto", "human", "json"),
        default="auto",
        help="for people or for machines (default: for people on a terminal)",
    )
    logs.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="the least severe lines (default: info)",
    )
