"""The verb `top`: what a service does, live."""

import os
from argparse import Namespace

from inferpool.service.tools.top.plan import plan_of
from inferpool.service.tools.top.run import run as show


def run(args: Namespace) -> int:
    """Show a service until Ctrl-C; returns the exit status.

    Raises:
        FlagError: The flags make no sense.
    """
    return show(plan_of(args, os.environ))
