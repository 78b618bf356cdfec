"""Checks of the address, the API keys, the certificate and the settings file."""

import errno
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path

from inferpool.service.api.wire.listening import listen
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.errors import StartError
from inferpool.service.settings.names import SettingsError
from inferpool.service.settings.settings import Settings, is_loopback
from inferpool.service.settings.tls import TlsError, expiry_warning, server_context

_MIN_BACKLOG = 1024
_ANSWER_S = 3.0
_LIVE = b'{"status":"live"}'


def check_address(
    settings: Settings, somaxconn: Path, answer_s: float = _ANSWER_S
) -> Iterator[Finding]:
    """Check that the service can listen on the address, and which hosts can reach it."""
    try:
        with listen(settings.host, settings.port) as listener:
            address = str(listener.getsockname()[0])
            further = list(_check_further(settings))
    except StartError as failure:
        if _is_ours(settings, failure, answer_s):
            yield note(
                "address",
                f"a running inferpool uses {settings.host}:{settings.port}",
                "stop it before you start another one there, or choose another port with --port",
            )
            return
        yield error("address", str(failure), "choose another address with --host or --port")
        return
    yield ok("address", f"{settings.host}:{settings.port} is free")
    yield from further
    if not (settings.predict_keys or ip_address(address.partition("%")[0]).is_loopback):
        yield warning(
            "API keys",
            f"anyone who reaches {address} may use this service: no key is set",
            "set INFERPOOL_PREDICT_KEYS or --predict-keys-file, or listen on 127.0.0.1",
        )
    elif settings.predict_keys and settings.tls_certificate is None and address != "127.0.0.1":
        yield note(
            "API keys",
            "clients send them unencrypted, unless a proxy in front speaks TLS",
            "set tls_certificate and tls_key if there is no such proxy",
        )
    backlog = _number(somaxconn)
    if backlog is not None and backlog < _MIN_BACKLOG:
        yield note(
            "backlog",
            f"the kernel keeps only {backlog} connections that wait for an accept",
            f"sysctl net.core.somaxconn={socket.SOMAXCONN}",
        )


def check_tls(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check that HTTPS works, and until when."""
    certificate = settings.tls_certificate
    if certificate is None:
        return
    try:
        server_context(certificate, settings.tls_key)
    except TlsError as failure:
        yield error("TLS", str(failure), "give the PEM files of a certificate and of its key")
        return
    if expiry := expiry_warning(certificate):
        yield warning("TLS", expiry, "renew it, and restart the service")
    else:
        yield ok("TLS", f"{certificate} and its key are valid and belong together")


def check_settings_file(origins: Mapping[str, str]) -> Iterator[Finding]:
    """Check that only its owner may write to the settings file, since it decides what code runs."""
    places = {origin.removeprefix("file ") for origin in origins.values() if "file " in origin}
    for place in sorted(places):
        try:
            mode = os.stat(place).st_mode
        except OSError:
            continue  # not the name of a file
        if mode & stat.S_IWOTH:
            yield warning(
                "settings",
                f"everyone on this host may write to {place}, which decides what code runs",
                f"chmod o-w {place}",
            )
        else:
            yield ok("settings", f"read from {place}")


def _check_further(settings: Settings) -> Iterator[Finding]:
    """Check that the service can listen on TorchServe's addresses besides that of predictions."""
    if settings.torchserve is None or settings.only_predictions:
        return
    from inferpool.service.settings.properties import address_of, read_properties

    keys = {
        "management_address": ("ADMIN", settings.admin_keys),
        "metrics_address": ("METRICS", settings.metrics_keys or settings.predict_keys),
    }
    for name, (kind, known) in keys.items():
        try:
            properties = read_properties(Path(settings.torchserve))
            address = address_of(properties, name)
            if kind == "METRICS" and not properties.is_true("enable_metrics_api", default=True):
                continue
            is_main = address == address_of(properties, "inference_address")
            host = settings.host if is_main else address.host
            if not is_main:
                listen(address.host, address.port, name).close()
        except (StartError, SettingsError) as failure:
            yield error(name, str(failure), f"choose another one in {settings.torchserve}")
            continue
        if known or is_loopback(host):
            yield ok(name, f"{address.host}:{address.port} is free")
        else:
            text = f"other hosts could reach {host}, and no key would be needed there"
            yield error(name, text, f"set INFERPOOL_{kind}_KEYS, or listen on 127.0.0.1")


def _is_ours(settings: Settings, failure: StartError, answer_s: float) -> bool:
    """Return whether the process on the address answers like an inferpool."""
    if getattr(failure.__cause__, "errno", None) != errno.EADDRINUSE:
        return False
    import httpx  # only if the address is taken

    from inferpool.service.client.connecting import STRAIGHT, open_client

    scheme = "http" if settings.tls_certificate is None else "https"
    url = httpx.URL(scheme=scheme, host=settings.host, port=settings.port, path="/health/live")
    try:
        with (
            open_client(STRAIGHT, verify=False, timeout=httpx.Timeout(answer_s)) as client,
            client.stream("GET", url) as answer,
        ):
            return answer.status_code == 200 and next(answer.iter_raw(64), b"") == _LIVE
    except httpx.HTTPError:
        return False


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
