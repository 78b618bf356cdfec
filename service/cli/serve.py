"""The verb `serve`: runs a service until a signal ends it."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from inferpool.service.cli.flags import settings_in
from inferpool.service.cli.starting import CANNOT_START, NoRoomError, prepared
from inferpool.service.settings.loader import LoadedSettings, load, secret_variables
from inferpool.service.settings.model_sources import modules_to_preload, packages_to_preload
from inferpool.service.settings.names import FlagError, SettingsError
from inferpool.service.settings.settings import Settings, shows_errors
from inferpool.service.settings.tls import CLUSTER, TlsError, mutual_context, server_context
from inferpool.service.settings.unloadable import check_loadable


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
    if not args.reload:  # it waits until the mistake is changed
        check_loadable(loaded.settings, loaded.origins)
    if args.debug:
        if loaded.settings.cluster_port is not None:
            raise FlagError("--debug computes in this process: leave out cluster_port")
        return _debug(args, loaded)
    for name in secret_variables(os.environ):  # so that model code cannot read them there
        del os.environ[name]
    # CUDA reads this variable in the workers, for any source of the setting.
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = loaded.settings.cuda_mps_pipe_directory
    is_shown = shows_errors(loaded.settings, at_terminal=sys.stderr.isatty())
    settings = loaded.settings.model_copy(update={"show_errors": is_shown})
    modules = None  # other hosts compute
    if settings.cluster_port is None:
        modules = modules_to_preload(settings.sources(), Path.cwd())
    try:
        with prepared(settings.log_format, modules) as raw:
            # Only now: it takes about as long as the forkserver needs to import torch.
            from inferpool.service.app import run as run_app

            return run_app(settings, loaded.origins, raw, loaded.warnings, state=loaded.state)
    except NoRoomError as error:
        sys.stderr.write(f"inferpool: {error}\n")
        return CANNOT_START


def _debug(args: Namespace, loaded: LoadedSettings) -> int:
    from inferpool.service import debugging  # it imports torch
    from inferpool.workers.beside.reloading import serve_anew

    def serve() -> int:
        files = debugging.WatchedFiles(Path.cwd())
        try:
            now = load(settings_in(args), os.environ, Path.cwd())
        except SettingsError as error:
            sys.stderr.writelines(f"inferpool: {problem}\n" for problem in error.problems)
            return debugging.wait_for_change(files)
        return debugging.run(now, files)

    if not args.reload:
        os._exit(debugging.run(loaded))
    packages = packages_to_preload(loaded.settings.sources(), Path.cwd())
    os._exit(serve_anew(serve, debugging.INSTALLED, packages))


def _check_tls(settings: Settings) -> None:
    """Raise a `SettingsError` for an unusable certificate, before the slow import of torch."""
    try:
        if settings.tls_certificate is not None:
            server_context(settings.tls_certificate, settings.tls_key)
        authority = settings.cluster_authority
        if settings.cluster_certificate is not None and authority is not None:
            files = (settings.cluster_certificate, settings.cluster_key, authority)
            mutual_context(*files, CLUSTER, is_server=True)
    except TlsError as error:
        raise SettingsError([str(error)]) from error
