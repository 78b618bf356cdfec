"""The verb `chaos`: kills workers of its own service under load."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from inferpool.service.cli.flags import settings_in
from inferpool.service.settings.loader import load
from inferpool.service.settings.unloadable import check_loadable
from inferpool.service.tools.chaos.plan import plan_of
from inferpool.service.tools.chaos.run import run as disturb


def run(args: Namespace) -> int:
    """Run a service under faults, and print whether every answer was right; return the status.

    Raises:
        SettingsError: The settings cannot be used.
    """
    loaded = load(settings_in(args), os.environ, Path.cwd())
    sys.stderr.writelines(f"inferpool chaos: {each}\n" for each in loaded.warnings)
    check_loadable(loaded.settings, loaded.origins)
    return disturb(loaded, plan_of(args))
