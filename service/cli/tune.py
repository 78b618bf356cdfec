"""The verb `tune`: finds the best settings for a model on this machine."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from inferpool.service.cli.flags import settings_in
from inferpool.service.settings.loader import load
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.unloadable import check_loadable
from inferpool.service.tools.tune.plan import plan_of, problem_with
from inferpool.service.tools.tune.run import run as search


def run(args: Namespace) -> int:
    """Measure settings, and write the best to a file; return the exit status.

    Raises:
        FlagError: The flags make no sense.
        SettingsError: The settings cannot be used.
    """
    plan = plan_of(args)
    if problem := problem_with(plan):
        raise FlagError(problem)
    given, cwd = settings_in(args), Path.cwd()
    loaded = load(given, os.environ, cwd)
    if loaded.settings.cluster_port is not None:
        raise FlagError("tune measures on this machine alone: leave out cluster_port")
    names = list(loaded.settings.models)
    if not names:
        raise FlagError("there is no model to tune: name one")
    if len(names) > 1:
        raise FlagError(f"which of the models? inferpool tune {' | '.join(names)}")
    sys.stderr.writelines(f"inferpool tune: {each}\n" for each in loaded.warnings)
    check_loadable(loaded.settings, loaded.origins)
    # MODEL leaves the other models out, but the file keeps them.
    whole = load({"config": given["config"]} if "config" in given else {}, os.environ, cwd)
    return search(loaded, whole, plan)
