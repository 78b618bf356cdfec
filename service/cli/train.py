"""The verb `train`: trains a network on a folder of images."""

import shlex
import sys
from argparse import Namespace

from inferpool.models.texts import printable
from inferpool.service.client.usage import INTERRUPTED
from inferpool.service.settings.names import FlagError
from inferpool.service.signals import SHELL_OFFSET
from inferpool.service.train.run import How, train
from inferpool.service.train.settings import load_settings

_FAILED = 1


def run(args: Namespace) -> int:
    """Train; return the exit status.

    Raises:
        FlagError: The flags do not fit the images, the network or this host.
        SettingsError: The settings cannot be used.
    """
    how: How = "resume" if args.resume else "overwrite" if args.overwrite else "new"
    if args.resume and args.val is not None and args.data is None:
        raise FlagError("--val: a run that goes on keeps its images; leave it out")
    outcome = train(
        load_settings(args),
        how=how,
        images_are_named=args.data is not None,
        command=printable(shlex.join(["inferpool", *sys.argv[1:]])),
        is_quiet=args.quiet,
    )
    if outcome.status == "done":
        return 0
    if outcome.status == "failed":
        sys.stderr.write(f"inferpool train: {outcome.reason}\n")
        return _FAILED
    sys.stderr.write("inferpool train: stopped; the same command with --resume goes on\n")
    return SHELL_OFFSET + outcome.signum if outcome.signum else INTERRUPTED
