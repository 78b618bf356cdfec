"""The verb `serve`: a service, until a signal ends it."""

import contextlib
import errno
import faulthandler
import os
import signal
import sys
from argparse import Namespace
from multiprocessing import resource_tracker
from pathlib import Path

from inferpool.service.cli.flags import settings_in
from inferpool.service.settings.loader import LoadedSettings, load, secret_variables
from inferpool.service.settings.preload import modules_to_preload
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tls import TlsError, server_context
from inferpool.service.settings.usage import FlagError, SettingsError
from inferpool.service.telemetry.logs import is_json
from inferpool.service.telemetry.raw_output import RawOutput
from inferpool.workers.host.local import start_forkserver

CANNOT_START = 1
"""The exit status where this machine has no room for the service."""


def run(args: Namespace) -> int:
    """Serve until a signal; returns the exit status.

    Raises:
        FlagError: The flags make no sense.
        SettingsError: The settings cannot be used.
    """
    loaded = load(settings_in(args), os.environ, Path.cwd())
    _check_tls(loaded.settings)
    if args.reload and not args.debug:
        raise FlagError("--reload goes with --debug")
    if args.debug:
        return _debug(loaded, reloads=args.reload)
    for name in secret_variables(os.environ):  # so that model code cannot read them there
        del os.environ[name]
    # CUDA reads this in the workers, wherever we were told.
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = loaded.settings.cuda_mps_pipe_directory
    with contextlib.ExitStack() as stack:
        raw = None
        try:
            if is_json(loaded.settings.log_format, sys.stderr):
                # Before anything is started that could write there.
                raw = RawOutput.take()
                stack.callback(raw.close)
            faulthandler.register(signal.SIGQUIT, 2, chain=False)  # it goes on afterwards
            # First, since it lets Ctrl-C through once it has started.
            resource_tracker.ensure_running()
            # What we start inherits this and is deaf to Ctrl-C at once: it is for us to end it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # It imports torch while we import the rest.
            start_forkserver(modules_to_preload(loaded.settings.sources(), Path.cwd()))
        except OSError as error:
            stack.close()
            sys.stderr.write(f"inferpool: workers cannot be started: {error}{_cure(error)}\n")
            return CANNOT_START
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # Only now, since it takes as long as the forkserver takes to import torch.
        from inferpool.service.app import run as run_app

        return run_app(loaded.settings, loaded.origins, raw, loaded.warnings)


def _debug(loaded: LoadedSettings, *, reloads: bool) -> int:
    from inferpool.service.debugging import run as run_debugging  # which imports torch

    return run_debugging(loaded, reloads=reloads)


def _check_tls(settings: Settings) -> None:
    """See that HTTPS can be served: better said before torch is imported than after.

    Raises:
        SettingsError: It cannot.
    """
    if settings.tls_certificate is None:
        return
    try:
        server_context(settings.tls_certificate, settings.tls_key)
    except TlsError as error:
        raise SettingsError([str(error)]) from error


def _cure(error: OSError) -> str:
    """What may help against an error of starting a process."""
    cures = {
        errno.EAGAIN: "; raise the limit of processes (ulimit -u, or the container's pids limit)",
        errno.EMFILE: "; raise the limit of descriptors (ulimit -n)",
    }
    return cures.get(error.errno or 0, "")
