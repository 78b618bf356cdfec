"""The verb `doctor`: finds problems of this machine and these settings, or of a running cluster."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from inferpool.service.checks.findings import Finding, grouped, note
from inferpool.service.cli.flags import settings_in
from inferpool.service.client.cli.access import key_of, tls_context, url_of
from inferpool.service.client.cli.flags import ADMIN_KEY_VARIABLE, METRICS_KEY_VARIABLE
from inferpool.service.settings.loader import load, secret_variables
from inferpool.service.tools.doctor import report
from inferpool.service.tools.doctor.diagnosis import diagnose
from inferpool.service.tools.trial.screen import Screen
from inferpool.workers.host.devices import find_host

FOUND_ERRORS = 1
"""Exit status if something will not work."""


def run(args: Namespace) -> int:
    """Check this machine or a cluster, and print the findings; return the exit status.

    Raises:
        FlagError: The flags make no sense.
        SettingsError: The settings cannot be used.
    """
    findings = _of_cluster(args) if args.cluster is not None else _of_machine(args)
    write = report.write_json if args.format == "json" else report.write_table
    write(findings, sys.stdout)
    return FOUND_ERRORS if any(finding.level == "error" for finding in findings) else 0


def _of_machine(args: Namespace) -> list[Finding]:
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
        found = [note("settings", each) for each in loaded.warnings]
        found += diagnose(settings, host, loaded.origins, race)
        return grouped(found, settings.models)


def _of_cluster(args: Namespace) -> list[Finding]:
    from inferpool.service.tools.doctor import cluster  # imports the clients

    connection = cluster.ClusterConnection(
        url_of(args.cluster),
        tls_context(False if args.insecure else str(args.ca_file) if args.ca_file else True),
        key=key_of(None, os.environ, METRICS_KEY_VARIABLE),
        admin_key=key_of(args.key_file, os.environ, ADMIN_KEY_VARIABLE),
    )
    try:
        with Screen(sys.stderr, "looking at this cluster"):
            return list(cluster.check_cluster(connection))
    finally:
        connection.close()
