"""The names of settings, and the errors about how somebody uses the command `inferpool`.

    FlagError       the flags of a verb make no sense
    SettingsError   the settings cannot be used
    StateFileError  the file of changes made at run time cannot be used

Every verb imports this, so it imports next to nothing.
"""

import re
from collections.abc import Mapping, Sequence

from inferpool.service.client.usage import FlagError as FlagError

PREFIX = "INFERPOOL_"
"""The prefix of our variables in the environment."""
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

KEY_SETTINGS = ("predict_keys", "metrics_keys", "admin_keys", "cluster_keys")
"""Settings that hold secrets. Only the environment and files of their own give them."""

GONE: Mapping[str, str] = {
    "spread": "is gone: leave it out; the devices of a replica are those of one host",
}
"""Settings of a model that earlier programs had, and what to do about each."""

FLAG_GROUPS: Mapping[str, Mapping[str, str]] = {
    "": {
        "host": "ADDRESS",
        "port": "N",
        "grpc_port": "N",
        "tei": "",
        "torchserve": "PATH",
        "sagemaker": "",
        "watch": "FOLDER",
        "front_ends": "N",
        "job_store": "PLACE",
        "show_errors": "",
    },
    "access": {
        "predict_keys_file": "PATH",
        "metrics_keys_file": "PATH",
        "admin_keys_file": "PATH",
        "cors_origins": "ORIGINS",
        "tls_certificate": "PATH",
        "tls_key": "PATH",
        "root_path": "PATH",
        "proxy_headers": "",
        "forwarded_allow_ips": "IPS",
    },
    "cluster": {
        "cluster_port": "N",
        "cluster_host": "ADDRESS",
        "cluster_keys_file": "PATH",
        "cluster_certificate": "PATH",
        "cluster_key": "PATH",
        "cluster_authority": "PATH",
        "standby_of": "HOST:PORT",
    },
    "models": {
        "path": "PATH",
        "envelope": "true|false",
        "form": "HOW",
        "accepts": "WHICH",
        "replicas": "N",
        "devices": "WHERE",
        "placement": "HOW",
        "devices_per_replica": "N",
        "gpu_memory_fraction": "X",
        "weights": "WHICH",
        "max_batch_size": "N",
        "max_batch_tokens": "N",
        "objective_p99_ms": "MS",
        "check": "HOW",
        "speed": "HOW",
        "decode": "HOW",
        "decoders": "N",
    },
    "logs": {"log_format": "HOW", "log_level": "LEVEL"},
}
"""The settings that have a flag, and what stands for their values in the help, by its groups.

Those without a value turn something on. Flags for models apply to each model served.
"""
FLAGS: Mapping[str, str] = {
    name: f"--{name.replace('_', '-')}" for group in FLAG_GROUPS.values() for name in group
}

Key = tuple[str, ...]
"""The place of a setting: ("port",) or ("models", "resnet", "replicas")."""


def dotted(key: Key) -> str:
    """Return a key as TOML writes it: `models.resnet.replicas`, `models."v1.2".source`."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"' for part in key)


def way_to_set(name: str, *, of_model: bool) -> str:
    """Return how to give a setting: its flag, or else its variable."""
    return FLAGS.get(name) or f"{PREFIX}{'MODELS__NAME__' if of_model else ''}{name.upper()}"


def place_of(key: Key, origin: str) -> str:
    """Return the place of a value in the words of its origin.

    Args:
        key: The setting.
        origin: Its origin: "default", "file PATH", "environment VAR", "flag --x" and the like.
    """
    kind, _, where = origin.partition(" ")
    if kind in ("file", "state"):
        return f"{where}: {dotted(key)}"
    return where or dotted(key)


def is_foreign(variable: str, text: str) -> bool:
    """Return whether a variable with our prefix is not one of our settings.

    Kubernetes gives each container variables for the services around it. For a service that is
    called "inferpool" they are INFERPOOL_SERVICE_HOST, INFERPOOL_PORT=tcp://10.0.0.1:80 and the
    like (https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables).
    """
    if variable == CONFIG_VARIABLE:
        return True
    ports = r"PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?"
    if re.fullmatch(rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|{ports})", variable):
        return True
    return variable.endswith("PORT") and re.match(r"(tcp|udp|sctp)://", text) is not None


class SettingsError(Exception):
    """The settings cannot be used.

    Attributes:
        problems: One line each: the place, the value, and what would be right.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class StateFileError(Exception):
    """The file of changes made at run time cannot be used; the message says why, and what to do."""
