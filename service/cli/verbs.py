"""The verbs of the command `inferpool`: what its help says of them, and where their code is.

A verb's code is imported when it is the one that was asked for, and here is the only place that
does so: the modules that are named below import what they need at their top.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One verb, and two functions of its own, each as "module:function"."""

    summary: str
    description: str
    flags: str | None = None
    """Adds its flags to a parser. Imported for `--help` too, so its module imports little."""
    code: str
    """Does what its flags say, and returns the exit status."""
    takes_settings: bool = False
    """Its arguments are those of `serve`, and some of its own."""

    def add_flags(self, parser: ArgumentParser) -> None:
        """Add its flags to its parser."""
        if self.takes_settings:
            _found("inferpool.service.cli.flags:add_settings_flags")(parser)
        if self.flags is not None:
            _found(self.flags)(parser)

    def run(self, args: Namespace) -> int:
        """Do what the arguments say; returns the exit status.

        Raises:
            FlagError: The flags make no sense.
            SettingsError: The settings cannot be used.
        """
        status = _found(self.code)(args)
        assert isinstance(status, int)
        return status


VERBS: Mapping[str, Verb] = {
    "serve": Verb(
        summary="serve models until told to stop",
        description="Serve models over HTTP until SIGTERM, SIGHUP or Ctrl-C. "
        "SIGQUIT writes to the log what all threads do.",
        flags="inferpool.service.cli.flags:add_serve_flags",
        code="inferpool.service.cli.serve:run",
        takes_settings=True,
    ),
    "predict": Verb(
        summary="ask a running service for predictions",
        description="Ask a running service for predictions on files or texts, and print them in "
        "order. Exit status: 0 if there was one for each, 1 if not, 2 for wrong arguments.",
        flags="inferpool.service.cli.flags:add_predict_flags",
        code="inferpool.service.cli.predict:run",
    ),
    "top": Verb(
        summary="show what a service does, live",
        description="Show throughput, latency, queue and workers of a service, second by second. "
        "Exit status: 0 once it has been shown, 1 if there is nothing to show, 2 for wrong "
        "arguments, 130 after Ctrl-C.",
        flags="inferpool.service.tools.top.plan:add_flags",
        code="inferpool.service.cli.top:run",
    ),
    "config": Verb(
        summary="print every setting in force, and who set it",
        description="Print the settings that `inferpool serve` with the same arguments would have.",
        flags="inferpool.service.cli.flags:add_config_flags",
        code="inferpool.service.cli.config:run",
        takes_settings=True,
    ),
    "doctor": Verb(
        summary="say what on this machine would go wrong, and what to do",
        description="Look at this machine and at the settings that `inferpool serve` with the same "
        "arguments would have. The exit status is 1 if something will not work.",
        flags="inferpool.service.cli.flags:add_doctor_flags",
        code="inferpool.service.cli.doctor:run",
        takes_settings=True,
    ),
    "tune": Verb(
        summary="measure which settings serve a model best here, and write them to a file",
        description="Start services of its own with settings that differ, load them in turns, and "
        "write the best settings to a file. Exit status: 0 if that was done, 1 if the file could "
        "not be written, 2 for wrong arguments, 3 if nothing could be measured or --budget is too "
        "short to try anything, and then no file is written, 130 after Ctrl-C, "
        "which prints what was found until then and writes no settings.",
        flags="inferpool.service.tools.tune.plan:add_flags",
        code="inferpool.service.cli.tune:run",
        takes_settings=True,
    ),
    "chaos": Verb(
        summary="kill workers of a service under load, and see whether it keeps its word",
        description="Start a service of its own, load it with numbered requests whose right "
        "answers are known, and SIGKILL, SIGSTOP and poison its workers meanwhile. Exit status: 0 "
        "if each request had exactly one right answer, 1 if not, 3 if nothing could be tested.",
        flags="inferpool.service.tools.chaos.plan:add_flags",
        code="inferpool.service.cli.chaos:run",
        takes_settings=True,
    ),
    "version": Verb(
        summary="print the versions of inferpool, Python and torch",
        description="Print the versions of inferpool and of what it stands on.",
        code="inferpool.service.cli.version:run",
    ),
}


def _found(reference: str) -> Callable[..., object]:
    module, _, name = reference.partition(":")
    function: Callable[..., object] = getattr(import_module(module), name)
    return function
