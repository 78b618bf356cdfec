"""The verb `doctor`: finds problems of this machine and these settings."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from inferpool.service.checks.findings import grouped
from inferpool.service.cli.flags import settings_in
from inferpool.service.settings.loader import load, secret_variables
from inferpool.service.tools.doctor import report
from inferpool.service.tools.doctor.diagnosis import diagnose
from inferpool.service.tools.trial.screen import Screen
from inferpool.workers.host.devices import find_host

FOUND_ERRORS = 1
"""Exit status if something will not work."""


def run(args: Namespace) -> int:
    """Check this machine, and print the findings; return the exit status.

    Raises:
        SettingsError: The settings cannot be used.
    """
    loaded = load(settings_in(args), os.environ, Path.cwd())
    for name in secret_variables(os.environ):  # as `serve` does
        del os.environ[name]
    settings = loaded.settings
    with Screen(sys.stderr, "looking at this machine and these models") as screen:
        race = None
        if args.measure:
            from inferpool.service.tools.tune.race import PlacementRace  # imports the clients

            race = PlacementRace(loaded, screen)
        host = find_host(settings.cuda_visible_devices, settings.cuda_device_order)
        found = diagnose(settings, host, loaded.origins, race)
        findings = grouped(found, settings.models)
    write = report.write_json if args.format == "json" else report.write_table
    write(findings, sys.stdout)
    return FOUND_ERRORS if any(finding.level == "error" for finding in findings) else 0
