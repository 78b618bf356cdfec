"""The verb `version`: prints the installed versions."""

import platform
import sys
from argparse import Namespace

from inferpool.service.telemetry.versions import version_of


def run(_: Namespace) -> int:
    """Print the versions of inferpool, Python and torch; return the exit status."""
    lines = [f"inferpool {version_of()}", f"Python {platform.python_version()}"]
    for name in ("torch", "torchvision"):
        found = version_of(name)
        lines.append(f"{name} {'is not installed' if found == 'unknown' else found}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
