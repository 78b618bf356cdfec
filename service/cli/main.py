"""The command `inferpool`, from its arguments to its exit status."""

import sys
from collections.abc import Collection, Sequence

from inferpool.service.cli.verbs import VERBS
from inferpool.service.client.cli.main import CommandLine
from inferpool.service.client.usage import USAGE_ERROR
from inferpool.service.settings.names import GONE, SettingsError, StateFileError, way_to_set

UNUSABLE_STATE = 1
"""Exit status if the file of changes made at run time cannot be used."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "--version":
        argv = ["version", *argv[1:]]
    try:
        return INFERPOOL.run(argv)
    except SettingsError as error:
        sys.stderr.writelines(f"inferpool: {problem}\n" for problem in error.problems)
        return USAGE_ERROR
    except StateFileError as error:
        sys.stderr.write(f"inferpool: {error}\n")
        return UNUSABLE_STATE


def _explain(flag: str, known: Collection[str]) -> str:
    """Return what a flag was, or how to give its setting; empty if there is none."""
    if gone := GONE.get(flag.removeprefix("--")):
        return f"{flag} {gone}"
    if "--config" not in known:
        return ""
    from inferpool.service.settings.fields import fields_of  # only once something is wrong

    name = flag.removeprefix("--").replace("-", "_")
    for module, table, where in (
        ("settings", "Settings", "at the top of inferpool.toml"),
        ("model", "ModelSettings", "under [models.NAME] in inferpool.toml"),
    ):
        fields = fields_of(f"inferpool.service.settings.{module}", table)
        if any(field.name == name for field in fields):
            way = way_to_set(name, of_model=table == "ModelSettings")
            setting = f"`{name} = ...` {where}, or the variable {way}"
            return f"there is no flag {flag}, but a setting: {setting}"
    return ""


_EXAMPLES = """\
examples:
  inferpool serve                              the packaged image classifier
  inferpool serve torchvision:resnet50         a network of torchvision
  inferpool serve minilm_l6                    texts to vectors
  inferpool serve my_package.nets:MyModel      your own class
  inferpool serve my_nets:MyModel --debug      the same in one process; breakpoint() works
  inferpool serve exported.pt2 --replicas 2    a torch.export archive, in two processes
  inferpool serve model.onnx                   a file of ONNX; .skops, folders of transformers too
  inferpool agent --join 10.0.0.1:8470         run its workers on this host too
  inferpool predict photo.jpg                  ask a running service
  inferpool jobs submit inputs.jsonl --wait    hand many inputs to it as a job
  inferpool train photos/ --output run/        make a classifier from a folder of images
  inferpool serve run/                         and serve it
  inferpool import model.mar --output served/  unpack an archive of TorchServe
  inferpool top                                watch a service live
  inferpool models swap cats --weights new.pth another version, if it is good enough
  inferpool doctor                             find problems here, and what to do
  inferpool tune torchvision:resnet50          measure the best settings here
  inferpool config                             every setting in force, and who set it
  inferpool config --describe                  every setting, and what it means
  inferpool chaos echo                         check answers while workers die
"""

INFERPOOL = CommandLine(
    description="Serve PyTorch models over HTTP from a pool of worker processes.",
    examples=_EXAMPLES,
    example="inferpool serve --port 80",
    verbs=VERBS,
    if_missing="Without it, only version, predict and jobs work; `pip install .` in the clone "
    "installs the rest",
    explain=_explain,
)
