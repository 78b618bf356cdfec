"""Who may ask: the API keys."""

from collections.abc import Iterator, Mapping
from itertools import combinations

from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, warning
from inferpool.service.settings.keys import Keys, fingerprint_of
from inferpool.service.settings.settings import Settings


def check_keys(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Whether each key is for one kind of call: else whoever may predict may do the other too."""
    scopes: Mapping[str, Keys] = {
        "predict_keys": settings.predict_keys,
        "metrics_keys": settings.metrics_keys,
        "admin_keys": settings.admin_keys,
    }
    for (name, keys), (other_name, others) in combinations(scopes.items(), 2):
        if shared := sorted(keys.digests & others.digests):
            which = ", ".join(fingerprint_of(digest) for digest in shared)
            yield warning(
                "API keys",
                f"{name} and {other_name} share a key (SHA-256 {which}...): whoever has it may ask "
                "for both",
                "give each a key of its own: `openssl rand -hex 32`",
            )
