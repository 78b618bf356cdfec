"""The address, and who may reach it; the file of settings."""

import os
import socket
import stat
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path

from service.doctor.findings import Finding, error, note, ok, warning
from service.listening import StartError, listen
from service.settings import Settings

_MIN_BACKLOG = 1024


def check_address(settings: Settings, somaxconn: Path) -> Iterator[Finding]:
    """Whether the address can be listened on, and by whom it can be reached."""
    try:
        with listen(settings.host, settings.port) as listener:
            address = str(listener.getsockname()[0])
    except StartError as failure:
        yield error("address", str(failure), "choose another with --host or --port")
        return
    yield ok("address", f"{settings.host}:{settings.port} is free")
    if not (settings.predict_keys or ip_address(address.partition("%")[0]).is_loopback):
        yield warning(
            "API keys",
            f"whoever reaches {address} may use this service: no key is set",
            "set INFERPOOL_PREDICT_KEYS or --predict-keys-file, or listen on 127.0.0.1",
        )
    elif settings.predict_keys and settings.tls_certificate is None and address != "127.0.0.1":
        yield note(
            "API keys",
            "they cross the network in the clear, unless a proxy before us speaks TLS",
            "set tls_certificate and tls_key where none does",
        )
    backlog = _number(somaxconn)
    if backlog is not None and backlog < _MIN_BACKLOG:
        yield note(
            "backlog",
            f"the kernel keeps {backlog} connections that wait to be accepted",
            f"sysctl net.core.somaxconn={socket.SOMAXCONN}",
        )


def check_settings_file(origins: Mapping[str, str]) -> Iterator[Finding]:
    """A file that others may write to decides which code runs."""
    places = {origin.removeprefix("file ") for origin in origins.values() if "file " in origin}
    for place in sorted(places):
        try:
            mode = os.stat(place).st_mode
        except OSError:
            continue  # the name of something else
        if mode & stat.S_IWOTH:
            yield warning(
                "settings",
                f"everyone on this host may write to {place}, which says what code runs",
                f"chmod o-w {place}",
            )
        else:
            yield ok("settings", f"read from {place}")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
