"""The verb `serve`: runs a service until a signal ends it."""

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
from inferpool.service.settings.names import FlagError, SettingsError
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.sources import modules_to_preload
from inferpool.service.settings.tls import CLUSTER, TlsError, mutual_context, server_context
from inferpool.service.telemetry.logs import is_json
from inferpool.service.telemetry.raw_output import RawOutput
from inferpool.workers.host.local import start_forkserver

CANNOT_START = 1
"""Exit status if this machine has no room for the service."""


def run(args: Namespace) -> int:
    """Serve until a signal; return the exit status.

    Raises:
        FlagError: The flags make no sense.
        SettingsError: The settings cannot be used.
        StateFileError: The file of changes made at run time cannot be used.
    """
    loaded = load(settings_in(args), os.environ, Path.cwd())
    _check_tls(loaded.settings)
    if args.reload and not args.debug:
        raise FlagError("--reload needs --debug")
    if args.debug:
        if loaded.settings.cluster_port is not None:
            raise FlagError("--debug computes in this process: leave out cluster_port")
        return _debug(loaded, reloads=args.reload)
    for name in secret_variables(os.environ):  # so that model code cannot read them there
        del os.environ[name]
    # CUDA reads this variable in the workers, wherever the setting came from.
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = loaded.settings.cuda_mps_pipe_directory
    with contextlib.ExitStack() as stack:
        raw = None
        try:
            if is_json(loaded.settings.log_format, sys.stderr):
                # Before anything starts that could write there.
                raw = RawOutput.take()
                stack.callback(raw.close)
            faulthandler.register(signal.SIGQUIT, 2, chain=False)  # the process goes on afterwards
            # First, since its start unblocks SIGINT.
            resource_tracker.ensure_running()
            # Child processes inherit the block, so Ctrl-C does not reach them; we end them.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            if loaded.settings.cluster_port is None:
                # It imports torch while we import the rest.
                start_forkserver(modules_to_preload(loaded.settings.sources(), Path.cwd()))
        except OSError as error:
            stack.close()
            sys.stderr.write(f"inferpool: workers cannot be started: {error}{_cure(error)}\n")
            return CANNOT_START
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # Only now: it takes about as long as the forkserver needs to import torch.
        from inferpool.service.app import run as run_app

        return run_app(loaded.settings, loaded.origins, raw, loaded.warnings, state=loaded.state)


def _debug(loaded: LoadedSettings, *, reloads: bool) -> int:
    from inferpool.service.debugging import run as run_debugging  # which imports torch

    return run_debugging(loaded, reloads=reloads)


def _check_tls(settings: Settings) -> None:
    """Raise a `SettingsError` if a certificate is of no use, before the slow import of torch."""
    try:
        if settings.tls_certificate is not None:
            server_context(settings.tls_certificate, settings.tls_key)
        authority = settings.cluster_authority
        if settings.cluster_certificate is not None and authority is not None:
            files = (settings.cluster_certificate, settings.cluster_key, authority)
            mutual_context(*files, CLUSTER, is_server=True)
    except TlsError as error:
        raise SettingsError([str(error)]) from error


def _cure(error: OSError) -> str:
    """Return advice on an error of starting a process."""
    cures = {
        errno.EAGAIN: "; raise the limit of processes (ulimit -u, or the container's pids limit)",
        errno.EMFILE: "; raise the limit of descriptors (ulimit -n)",
    }
    return cures.get(error.errno or 0, "")
