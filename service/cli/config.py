"""The verb `config`: the settings in force, or what each setting means."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from inferpool.service.cli import describe as describe
from inferpool.service.cli.flags import settings_in
from inferpool.service.settings import formats as in_force
from inferpool.service.settings.loader import load
from inferpool.service.settings.usage import FlagError


def run(args: Namespace) -> int:
    """Print settings; returns the exit status.

    Raises:
        FlagError: The flags make no sense.
        SettingsError: The settings cannot be used.
    """
    if bool(args.describe) != (args.format == "markdown") and args.format in ("toml", "markdown"):
        only = "the settings in force" if args.format == "toml" else "the list of all: --describe"
        raise FlagError(f"--format {args.format} is for {only}")
    if args.describe:
        write_all = {"table": describe.write_text, "markdown": describe.write_markdown}
        try:
            settings = describe.settings_of(args.describe)
        except KeyError as error:
            raise FlagError(f"--describe: {error.args[0]}") from error
        write_all.get(args.format, describe.write_json)(settings, sys.stdout)
        return 0
    loaded = load(settings_in(args), os.environ, Path.cwd())
    write = {"table": in_force.write_table, "toml": in_force.write_toml}
    write.get(args.format, in_force.write_json)(loaded.rows(), sys.stdout)
    return 0
