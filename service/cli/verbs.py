"""The verbs of the command `inferpool`: their help texts and their modules.

Only the code of the chosen verb is imported, and only here: the modules named below import what
they need at their top.
"""

from collections.abc import Mapping
from dataclasses import replace

from inferpool.service.client.cli import verbs
from inferpool.service.client.cli.verbs import Verb

_SETTINGS_FLAGS = "inferpool.service.settings.flags:add_settings_flags"
_SETTINGS = """\
MODEL is a source (efficientnet_lite0, minilm_l6, echo, torchvision:NAME, encoder:FOLDER,
reranker:FOLDER, package.module:Class, a folder of transformers, or a .pt2, .onnx, .skops, .mar or
TorchScript file) or the name of a model in the settings. Without it, every model of the settings is
served, or efficientnet_lite0 where there is none.

Settings come from inferpool.toml in this directory (or --config, or INFERPOOL_CONFIG); variables
such as INFERPOOL_PORT=9000 or INFERPOOL_MODELS__RESNET__REPLICAS=2 override the file, and flags
override both. `inferpool config` lists all of them.
"""

VERBS: Mapping[str, Verb] = {
    "serve": Verb(
        summary="serve models until told to stop",
        description="Serve models over HTTP until SIGTERM, SIGHUP or Ctrl-C. "
        "SIGQUIT writes the stacks of all threads to the log.",
        epilog=_SETTINGS,
        flags=(_SETTINGS_FLAGS, "inferpool.service.cli.flags:add_serve_flags"),
        code="inferpool.service.cli.serve:run",
    ),
    "agent": Verb(
        summary="run the workers of a service on this host",
        description="Offer the devices of this host to the front end at an address, and run the "
        "workers that it asks for, until SIGTERM, SIGHUP or Ctrl-C. It dials again whenever the "
        "connection ends. Exit status: 0 after its end, 1 if it cannot start, or with --once if it "
        "is refused.",
        flags=("inferpool.service.cli.flags:add_agent_flags",),
        code="inferpool.service.cli.agent:run",
    ),
    "predict": verbs.VERBS["predict"],
    "batch": Verb(
        summary="compute a whole folder, archive or table",
        description="Compute all inputs of a folder, list, archive or table, with workers of its "
        "own or, with --url, in a running service. Inputs that fail are listed at the end. Exit "
        "status: 0 if each has a prediction, 1 if the model could not be started or was lost, 2 "
        "for wrong arguments, 4 if some failed, 5 if more failed than --max-errors allows, 130 "
        "after Ctrl-C. After any end --resume goes on.",
        flags=("inferpool.service.batch.flags:add_flags",),
        code="inferpool.service.cli.batch:run",
    ),
    "jobs": verbs.VERBS["jobs"],
    "train": Verb(
        summary="make a classifier from a folder of images",
        description="Train an image classifier on a folder of images, on all GPUs or idle cores, "
        "and leave a folder that `inferpool serve` serves. Exit status: 0 if it was trained, 1 if "
        "the training failed, 2 for wrong arguments or images, 130 after Ctrl-C, 143 after "
        "SIGTERM. After any of them --resume goes on from the last checkpoint.",
        flags=("inferpool.service.train.flags:add_flags",),
        code="inferpool.service.cli.train:run",
    ),
    "import": Verb(
        summary="make a folder that serves from an archive of TorchServe",
        description="Unpack an archive of TorchServe into a folder that `inferpool serve` serves, "
        "and say what is in it. An archive is code, which runs when it is served; this verb runs "
        "none of it, and installs nothing. Exit status: 0 if the folder was made, 1 if the archive "
        "is refused or cannot be read, 2 for wrong arguments, 130 after Ctrl-C. After any failure "
        "the folder is as it was.",
        flags=("inferpool.service.cli.flags:add_import_flags",),
        code="inferpool.service.cli.importing:run",
    ),
    "top": verbs.VERBS["top"],
    "models": replace(
        verbs.VERBS["models"],  # with flags and checks that need the settings of a model
        flags=("inferpool.service.tools.models.plan:add_flags",),
        code="inferpool.service.tools.models.run:run",
    ),
    "place": Verb(
        summary="have Ray place, start and restart agents on the hosts of a cluster",
        description="Keep an agent on each host of a Ray cluster, or on as many as a front end's "
        "load needs, until SIGTERM, SIGHUP or Ctrl-C; the agents go on. Exit status: 0 after a "
        "signal, or once --stop is done, 1 if it cannot work with this cluster, 2 for wrong "
        "arguments.",
        flags=("inferpool.service.tools.place.plan:add_flags",),
        code="inferpool.service.tools.place.run:run",
    ),
    "config": Verb(
        summary="print every setting in force, and who set it",
        description="Print the settings that `inferpool serve` would have with the same arguments.",
        epilog=_SETTINGS,
        flags=(_SETTINGS_FLAGS, "inferpool.service.cli.flags:add_config_flags"),
        code="inferpool.service.cli.config:run",
    ),
    "doctor": Verb(
        summary="find problems of this machine and these settings, and say what to do",
        description="Check this machine, and the settings that `inferpool serve` would have with "
        "the same arguments. The exit status is 1 if something will not work.",
        epilog=_SETTINGS,
        flags=(_SETTINGS_FLAGS, "inferpool.service.cli.flags:add_doctor_flags"),
        code="inferpool.service.cli.doctor:run",
    ),
    "tune": Verb(
        summary="measure which settings serve a model best here, and write them to a file",
        description="Start services with different settings, load them in turns, and "
        "write the best settings to a file. Exit status: 0 if that was done, 1 if the file could "
        "not be written, 2 for wrong arguments, 3 if nothing could be measured, and then no file "
        "is written, 130 after Ctrl-C, which prints the results so far and writes no settings.",
        epilog=_SETTINGS,
        flags=(_SETTINGS_FLAGS, "inferpool.service.tools.tune.plan:add_flags"),
        code="inferpool.service.cli.tune:run",
    ),
    "chaos": Verb(
        summary="kill workers of a service under load, and check every answer",
        description="Start a service, load it with numbered requests whose right answers are "
        "known, and meanwhile SIGKILL, SIGSTOP and poison its workers. Exit status: 0 "
        "if each request had exactly one right answer, 1 if not, 3 if nothing could be tested.",
        epilog=_SETTINGS,
        flags=(_SETTINGS_FLAGS, "inferpool.service.tools.chaos.plan:add_flags"),
        code="inferpool.service.cli.chaos:run",
    ),
    "version": Verb(
        summary="print the versions of inferpool, Python and torch",
        description="Print the versions of inferpool, Python and torch.",
        code="inferpool.service.cli.version:run",
    ),
}
