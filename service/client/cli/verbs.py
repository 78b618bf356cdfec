"""The verbs of a command: their help texts and their modules.

Only the code of the chosen verb is imported, and only here: the modules named below import what
they need at their top.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from ..usage import COMMAND


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A verb. Its functions are named as "module:function"."""

    summary: str
    description: str
    epilog: str | None = None
    flags: tuple[str, ...] = ()
    """Functions that add its flags; `--help` imports them too, so their modules import little."""
    code: str
    """Function that runs the verb and returns the exit status."""

    def add_flags(self, parser: ArgumentParser) -> None:
        """Add the flags of this verb to its parser."""
        for each in self.flags:
            _found(each)(parser)

    def run(self, args: Namespace) -> int:
        """Run the verb; return the exit status.

        Raises:
            FlagError: The flags make no sense.
        """
        status = _found(self.code)(args)
        assert isinstance(status, int)
        return status


_HERE = __package__
_CLIENT = _HERE.removesuffix(".cli")

VERBS: Mapping[str, Verb] = {
    "predict": Verb(
        summary="ask a running service for predictions",
        description="Ask a running service for predictions on files or texts, and print them in "
        "order. Exit status: 0 if there was one for each, 1 if not, 2 for wrong arguments.",
        flags=(f"{_HERE}.flags:add_predict_flags",),
        code=f"{_HERE}.predict:run",
    ),
    "jobs": Verb(
        summary="hand jobs to a running service, wait for them and read their results",
        description="Hand jobs to a running service, wait for them, read their results and end "
        "them. The service keeps them through crashes, and computes them when other calls leave "
        f"room. `{COMMAND} jobs WHAT --help` tells of each.",
        flags=(f"{_HERE}.flags:add_jobs_flags",),
        code=f"{_HERE}.jobs:run",
    ),
    "top": Verb(
        summary="watch a service live",
        description="Show throughput, latency, queue and workers of a service, second by second. "
        "Exit status: 0 after a normal end, 1 if there is nothing to show, 2 for wrong "
        "arguments, 130 after Ctrl-C.",
        flags=(f"{_HERE}.flags:add_top_flags",),
        code=f"{_CLIENT}.top.run:run",
    ),
    "models": Verb(
        summary="add, remove and swap the models of a running service",
        description="Add, remove, list and swap the models of a running service, which needs keys "
        f"for administration. `{COMMAND} models WHAT --help` tells of each.",
        flags=(f"{_HERE}.flags:add_models_flags",),
        code=f"{_HERE}.models:run",
    ),
}
"""The verbs that need only the address of a service."""


def _found(reference: str) -> Callable[..., object]:
    module, _, name = reference.partition(":")
    function: Callable[..., object] = getattr(import_module(module), name)
    return function
