"""Findings of the checks: a level, a message and advice."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
"""A note is good to know; a warning may cost speed or requests; an error will break something."""
LEVELS: tuple[Level, ...] = ("error", "warning", "note", "ok")
"""All levels, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of a check."""

    check: str
    """Name of the check, in a word or two."""
    level: Level
    message: str
    advice: str = ""
    """The remedy; empty if none is needed."""
    is_fatal: bool = False
    """True if the service cannot start at all."""
    rows: tuple[tuple[str, ...], ...] = ()
    """Table with the details, the heading first."""

    def __str__(self) -> str:
        """Return one line for a log."""
        return f"{self.check}: {self.message}{'; ' if self.advice else ''}{self.advice}"


def ok(check: str, message: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check=check, level="ok", message=message)


def note(check: str, message: str, advice: str = "") -> Finding:
    """Return a finding that is good to know."""
    return Finding(check=check, level="note", message=message, advice=_with_ways(advice))


def warning(check: str, message: str, advice: str) -> Finding:
    """Return a finding that may cost speed or requests."""
    return Finding(check=check, level="warning", message=message, advice=_with_ways(advice))


def error(check: str, message: str, advice: str, *, is_fatal: bool = False) -> Finding:
    """Return a finding that something will not work."""
    return Finding(
        check=check, level="error", message=message, advice=_with_ways(advice), is_fatal=is_fatal
    )


def _with_ways(advice: str) -> str:
    from inferpool.service.settings.problems import with_ways  # not needed to show findings

    return with_ways(advice)


def grouped(findings: Iterable[Finding], models: Collection[str]) -> list[Finding]:
    """Merge findings that are equal for several models into one that names them."""
    groups: dict[Finding, list[str]] = {}
    for finding in findings:
        own = [name for name in models if finding.check.endswith(f" {name}")]
        name = max(own, key=len, default="")
        groups.setdefault(replace(finding, check=finding.check.removesuffix(name)), []).append(name)
    return [
        replace(finding, check=finding.check + names[0])
        if len(names) == 1 or not names[0]
        else replace(
            finding,
            check=f"{finding.check.removeprefix('model ')}{len(names)} models",
            message=f"{', '.join(names)}: {finding.message}",
        )
        for finding, names in groups.items()
    ]
