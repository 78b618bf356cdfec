"""The command line of `inferpool`: its parser, and what is said of a wrong one.

Imported for every verb, so it imports little.
"""

import difflib
import re
from argparse import ArgumentParser, HelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from inferpool.service.cli.verbs import VERBS

USAGE_ERROR = 2
"""The exit status for a wrong command line or wrong settings."""

_EXAMPLES = """\
examples:
  inferpool serve                              the packaged image classifier
  inferpool serve torchvision:resnet50         a network of torchvision
  inferpool serve minilm_l6                    texts to vectors
  inferpool serve my_package.nets:MyModel      a class of your own
  inferpool serve my_nets:MyModel --debug      the same in one process, with breakpoint()
  inferpool serve exported.pt2 --replicas 2    a torch.export archive, in two processes
  inferpool predict photo.jpg                  ask a running service
  inferpool top                                what a service does, live
  inferpool doctor                             what would go wrong here, and what to do
  inferpool tune torchvision:resnet50          measure which settings are best here
  inferpool config                             every setting in force, and who set it
  inferpool config --describe                  every setting there is, and what it means
  inferpool chaos echo                         see a service keep its word while workers die
"""
_SETTINGS = """\
MODEL is a source (efficientnet_lite0, minilm_l6, echo, torchvision:NAME, encoder:FOLDER,
package.module:Class, or a .pt2 or TorchScript file) or the name of a model in the settings. Without
it, every model of the settings is served, or efficientnet_lite0 where there is none.

Settings come from inferpool.toml in this directory (or --config, or INFERPOOL_CONFIG); variables
such as INFERPOOL_PORT=9000 or INFERPOOL_MODELS__RESNET__REPLICAS=2 go over the file, and flags
over both. `inferpool config` lists them all.
"""


def make_parser(chosen: str) -> tuple[ArgumentParser, Mapping[str, ArgumentParser]]:
    """Make the parser, and those of its verbs.

    Args:
        chosen: The verb that has its flags. The others have none, so that what those take need not
            be imported.
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
    """What to say of a word that a verb does not know."""
    if not word.startswith("-"):
        usage = parser.format_usage()
        if "[MODEL]" not in usage:
            hint = " A service is named by --url" if "--url" in usage else ""
            return f"what is {word!r}?{hint}"
        return f"one MODEL at most; what is {word!r}? Several models are served from a file"
    flag = word.partition("=")[0]
    known = re.findall(r"--[a-z0-9-]+", parser.format_help())
    return f"there is no flag {flag}; {nearest(flag, sorted(set(known)))}"


def nearest(word: str, candidates: Sequence[str]) -> str:
    """Which of the words there are was meant, or else all of them."""
    near = difflib.get_close_matches(word, candidates, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(candidates)}"


class _Parser(ArgumentParser):
    """Writes its complaints on two lines, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


class _Formatter(RawDescriptionHelpFormatter):
    """Wraps what is one paragraph, and leaves lines that were broken as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return HelpFormatter._fill_text(self, text, width, indent)
