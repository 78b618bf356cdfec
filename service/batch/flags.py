"""Flags of the verb `batch`. Its `--help` imports this, so it imports little."""

from argparse import ArgumentParser

from inferpool.service.client.cli.flags import (
    PREDICT_KEY_VARIABLE,
    add_access_flags,
    add_parameter_flag,
)
from inferpool.service.settings.flags import add_setting_flags

SETTINGS = ("replicas", "devices", "weights", "speed", "decode", "decoders", "max_batch_size")
"""Settings of the service that have a flag, for a run in this process."""


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of `batch`."""
    parser.add_argument(
        "input",
        metavar="INPUT",
        help="a folder (with a subfolder for each label, or flat), a glob in quotes, a list of "
        "files (.txt, .lst), a .tar as of webdataset, or a .csv, .jsonl or .parquet file",
    )
    add = parser.add_argument
    add("--column", metavar="NAME", help="column of the table, or field of each line of JSON")
    add("--output", default="-", metavar="PATH", help="a file for the answers (default: stdout)")
    add(
        "--format",
        choices=("jsonl", "csv", "parquet"),
        help="format of the output (default: by its name; jsonl on stdout)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--resume", action="store_true", help="go on exactly where an earlier run stopped"
    )
    how.add_argument("--overwrite", action="store_true", help="begin the output anew")
    add(
        "--order",
        choices=("kept", "free"),
        default="kept",
        help="write answers in the order of the inputs, or as they come (default: kept)",
    )
    add("--max-errors", type=int, metavar="N", help="stop if more inputs fail (default: never)")
    add(
        "--readers",
        type=int,
        metavar="N",
        help="processes that read ahead; 0 for none (default: one for each core, at most 4)",
    )
    add_parameter_flag(parser)
    add("--quiet", action="store_true", help="show no progress and no report")
    add("--model", metavar="MODEL", help="a source, as of `inferpool serve`, or a model's name")
    here = parser.add_argument_group("in this process")
    here.add_argument("--config", metavar="PATH", help="a TOML file of settings")
    add_setting_flags(here, SETTINGS)
    there = parser.add_argument_group("in a running service")
    there.add_argument("--url", help="address of the service")
    there.add_argument(
        "--concurrency", type=int, default=16, metavar="N", help="inputs at a time (default: 16)"
    )
    there.add_argument(
        "--timeout-s", type=float, default=60.0, metavar="N", help="for each input (default: 60)"
    )
    add_access_flags(parser, "predictions", PREDICT_KEY_VARIABLE)
