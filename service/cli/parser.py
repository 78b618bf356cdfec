"""The parser of the command line, and its error messages.

Every verb imports this, so it imports little.
"""

import difflib
import re
from argparse import ArgumentParser, HelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from inferpool.service.cli.verbs import VERBS
from inferpool.service.settings.names import GONE, way_to_set

USAGE_ERROR = 2
"""Exit status for a wrong command line or wrong settings."""

_EXAMPLES = """\
examples:
  inferpool serve                              the packaged image classifier
  inferpool serve torchvision:resnet50         a network of torchvision
  inferpool serve minilm_l6                    texts to vectors
  inferpool serve my_package.nets:MyModel      your own class
  inferpool serve my_nets:MyModel --debug      the same in one process; breakpoint() works
  inferpool serve exported.pt2 --replicas 2    a torch.export archive, in two processes
  inferpool agent --join 10.0.0.1:8470         run its workers on this host too
  inferpool predict photo.jpg                  ask a running service
  inferpool jobs submit inputs.jsonl --wait    hand many inputs to it as a job
  inferpool train photos/ --output run/        make a classifier from a folder of images
  inferpool serve run/                         and serve it
  inferpool top                                watch a service live
  inferpool models swap cats --weights new.pth another version, if it is good enough
  inferpool doctor                             find problems here, and what to do
  inferpool tune torchvision:resnet50          measure the best settings here
  inferpool config                             every setting in force, and who set it
  inferpool config --describe                  every setting, and what it means
  inferpool chaos echo                         check answers while workers die
"""
_SETTINGS = """\
MODEL is a source (efficientnet_lite0, minilm_l6, echo, torchvision:NAME, encoder:FOLDER,
package.module:Class, or a .pt2 or TorchScript file) or the name of a model in the settings. Without
it, every model of the settings is served, or efficientnet_lite0 where there is none.

Settings come from inferpool.toml in this directory (or --config, or INFERPOOL_CONFIG); variables
such as INFERPOOL_PORT=9000 or INFERPOOL_MODELS__RESNET__REPLICAS=2 override the file, and flags
override both. `inferpool config` lists all of them.
"""


def make_parser(chosen: str) -> tuple[ArgumentParser, Mapping[str, ArgumentParser]]:
    """Make the parser, and the parsers of the verbs.

    Only the chosen verb gets its flags, so that the modules of the others are not imported.
    """
    parser = _Parser(
        prog="inferpool",
        description="Serve PyTorch models over HTTP from a pool of worker processes.",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    adding = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    parsers = {}
    for name, verb in VERBS.items():
        parsers[name] = adding.add_parser(
            name,
            help=verb.summary,
            description=verb.description,
            epilog=_SETTINGS if verb.takes_settings else None,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
    if chosen in VERBS:
        VERBS[chosen].add_flags(parsers[chosen])
    return parser, parsers


def unrecognised(word: str, parser: ArgumentParser) -> str:
    """Return the error for a word that a verb does not know."""
    if not word.startswith("-"):
        usage = parser.format_usage()
        if "[MODEL]" not in usage:
            hint = " A service is named by --url" if "--url" in usage else ""
            return f"what is {word!r}?{hint}"
        return f"one MODEL at most; what is {word!r}? Several models are served from a file"
    flag = word.partition("=")[0]
    if gone := GONE.get(flag.removeprefix("--")):
        return f"{flag} {gone}"
    known = re.findall(r"--[a-z0-9-]+", parser.format_help())
    if "--config" in known and (hint := _setting_hint(flag)):
        return f"there is no flag {flag}, but {hint}"
    return f"there is no flag {flag}; {nearest(flag, sorted(set(known)))}"


def _setting_hint(flag: str) -> str:
    """Return how a setting is given that a word means as a flag; empty if it means none."""
    from inferpool.service.settings.fields import fields_of  # only once something is wrong

    name = flag.removeprefix("--").replace("-", "_")
    for module, table, where in (
        ("settings", "Settings", "at the top of inferpool.toml"),
        ("model", "ModelSettings", "under [models.NAME] in inferpool.toml"),
    ):
        fields = fields_of(f"inferpool.service.settings.{module}", table)
        if any(field.name == name for field in fields):
            way = way_to_set(name, of_model=table == "ModelSettings")
            return f"a setting: `{name} = ...` {where}, or the variable {way}"
    return ""


def nearest(word: str, candidates: Sequence[str]) -> str:
    """Return a hint with the most similar candidate, or with all of them."""
    near = difflib.get_close_matches(word, candidates, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(candidates)}"


class _Parser(ArgumentParser):
    """Writes an error on two lines, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print an error and exit."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


class _Formatter(RawDescriptionHelpFormatter):
    """Wraps a text of one line; keeps the line breaks of others."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return HelpFormatter._fill_text(self, text, width, indent)
