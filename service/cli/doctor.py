"""The verb `doctor`: what on this machine would go wrong."""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.service.checks.findings import grouped
from inferpool.service.cli.flags import settings_in
from inferpool.service.settings.loader import LoadedSettings, load, secret_variables
from inferpool.service.tools.doctor import report
from inferpool.service.tools.doctor.diagnosis import diagnose
from inferpool.service.tools.trial.screen import Screen
from inferpool.workers.host.devices import find_host

if TYPE_CHECKING:
    from inferpool.service.tools.tune.race import PlacementRace

FOUND_ERRORS = 1
"""The exit status where something will not work."""


def run(args: Namespace) -> int:
    """Look at this machine, and print what was found; returns the exit status.

    Raises:
        SettingsError: The settings cannot be used.
    """
    loaded = load(settings_in(args), os.environ, Path.cwd())
    for name in secret_variables(os.environ):  # as when it serves
        del os.environ[name]
    settings = loaded.settings
    with Screen(sys.stderr, "looking at this machine and these models") as screen:
        race = _race(loaded, screen) if args.measure else None
        host = find_host(settings.cuda_visible_devices)
        found = diagnose(settings, host, loaded.origins, race)
        findings = grouped(found, settings.models)
    write = report.write_json if args.format == "json" else report.write_table
    write(findings, sys.stdout)
    return FOUND_ERRORS if any(finding.level == "error" for finding in findings) else 0


def _race(loaded: LoadedSettings, screen: Screen) -> "PlacementRace":
    from inferpool.service.tools.tune.race import PlacementRace  # with clients, for which few ask

    return PlacementRace(loaded, screen)
