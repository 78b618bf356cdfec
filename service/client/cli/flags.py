"""Flags of the verbs that call a service. Their `--help` imports this, so it imports little."""

from argparse import ArgumentParser, _ActionsContainer, _SubParsersAction
from pathlib import Path

from ..urls import DEFAULT_URL
from ..usage import COMMAND

PREDICT_KEY_VARIABLE = "INFERPOOL_PREDICT_KEYS"
ADMIN_KEY_VARIABLE = "INFERPOOL_ADMIN_KEYS"
METRICS_KEY_VARIABLE = "INFERPOOL_METRICS_KEYS"
STATES = ("queued", "running", "succeeded", "failed", "cancelled")
_STATUS = (
    "Exit status: 0 if each instance has a prediction, 4 if some have none, 1 if a job failed, was "
    "cancelled or cannot be found, 2 for wrong arguments"
)


def add_url_flag(parser: ArgumentParser) -> None:
    """Add `--url`."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"address of the service (default: {DEFAULT_URL})"
    )


def add_access_flags(parser: ArgumentParser, kind: str, key_variable: str) -> None:
    """Add `--key-file`, `--ca-file` and `--insecure`.

    Args:
        parser: The verb's parser.
        kind: The purpose of the keys.
        key_variable: The variable with the key, if no file is named.
    """
    access = parser.add_argument_group("access")
    access.add_argument(
        "--key-file",
        type=Path,
        metavar="PATH",
        help=f"send the first key in it, where the service has keys for {kind} (default: the first "
        f"of {key_variable})",
    )
    access.add_argument(
        "--ca-file", type=Path, metavar="PATH", help="trust the certificates in this PEM file"
    )
    access.add_argument("--insecure", action="store_true", help="trust any certificate")


def add_predict_flags(parser: ArgumentParser) -> None:
    """Add the flags of `predict`."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="FILE",
        help="an image, .npy, .safetensors, .json or .txt file, or - for standard input",
    )
    parser.add_argument(
        "--text", action="append", default=[], metavar="TEXT", help="a text; may be repeated"
    )
    add_url_flag(parser)
    parser.add_argument("--model", metavar="NAME", help="model to ask, if not the default one")
    parser.add_argument(
        "--model-version",
        type=int,
        metavar="N",
        help="version of the model to ask, if not the one that serves",
    )
    add_parameter_flag(parser)
    parser.add_argument(
        "--no-envelope",
        dest="envelope",
        action="store_false",
        help="for a model that says envelope = False: an input is the whole body, and the answer "
        "the whole prediction",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=30.0,
        metavar="N",
        help="timeout for each input (default: 30)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a line of JSON for each input, with its timing and the version of the model",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="save what is no JSON, such as a picture, to this file; for several inputs, to this "
        "folder, as 0.png, 1.png, ...",
    )
    parser.add_argument(
        "--accept", metavar="TYPE", help="ask for an answer of this media type, such as image/png"
    )
    add_access_flags(parser, "predictions", PREDICT_KEY_VARIABLE)


def add_parameter_flag(parser: ArgumentParser) -> None:
    """Add `--parameter`, which `parameters_of` reads."""
    parser.add_argument(
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter for the model; the value is JSON or else a text; may be repeated",
    )


def add_jobs_flags(parser: ArgumentParser) -> None:
    """Add the flags and the actions of `jobs`."""
    adding = parser.add_subparsers(title="what to do", metavar="WHAT", dest="what", required=True)
    _add_submit(
        _add_job_parser(adding, "submit", "hand inputs to the service as a job, and print its id")
    )
    listed = _add_job_parser(adding, "list", "list jobs, the newest first")
    listed.add_argument(
        "--state", action="append", default=[], choices=STATES,
        help="list jobs in this state only; may be repeated",
    )  # fmt: skip
    listed.add_argument(
        "--limit", type=int, default=100, metavar="N", help="the most jobs (default: 100)"
    )
    listed.add_argument("--json", action="store_true", help="print a line of JSON for each job")
    shown = _add_job_parser(adding, "show", "show a job")
    shown.add_argument("id", metavar="ID", help="the id of the job")
    shown.add_argument("--json", action="store_true", help="print what the service answers")
    _add_result(
        _add_job_parser(adding, "result", "print the predictions of a job, a line of JSON for each")
    )
    waited = _add_job_parser(adding, "wait", "wait until jobs are over, and show how they go on")
    waited.add_argument("id", nargs="+", metavar="ID", help="the id of a job")
    _add_timeout(waited, "the longest wait for all of them (default: no limit)")
    waited.epilog = (
        f"A service that is restarted meanwhile is waited for. {_STATUS}, 3 if the time was up "
        "first, 130 after Ctrl-C; the jobs go on then."
    )
    for what, text in (
        ("cancel", "end jobs early; what was computed is kept"),
        ("delete", "delete jobs with their results; those that are not over are cancelled first"),
    ):
        ended = _add_job_parser(adding, what, text)
        ended.add_argument("id", nargs="+", metavar="ID", help="the id of a job")
        ended.epilog = "Exit status: 0 if that was done, 1 if not, 2 for wrong arguments."


def _add_submit(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="FILE",
        help="a .jsonl file (an instance a line), a .tar file (an instance a file), or - for lines "
        "of JSON on standard input; or images, .json and .txt files, an instance each",
    )
    add("--model", metavar="NAME", help="model to compute it, if not the default one")
    add_parameter_flag(parser)
    add("--priority", type=int, metavar="N", help="priority among jobs, from 1 to 9 (default: 5)")
    add("--webhook", metavar="URL", help="URL that the service tells when the job is over")
    add("--id", metavar="ID", help="the id of the job; the same again makes no second job")
    add("--wait", action="store_true", help="wait for its end; progress goes to stderr")
    add(
        "--result",
        action="store_true",
        help="wait for its end, and print its predictions instead of its id, which goes to stderr",
    )
    _add_timeout(parser, "with --wait or --result: the longest wait (default: no limit)")
    parser.epilog = (
        "Exit status: 0 once the service has the job, 1 if it does not take it, 2 for wrong "
        f"arguments; with --wait or --result that of `{COMMAND} jobs wait`."
    )


def _add_result(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("id", metavar="ID", help="the id of the job")
    add("--output", type=Path, metavar="PATH", help="write to this file (default: stdout)")
    add("--follow", action="store_true", help="print predictions while the job runs, to its end")
    add("--first", type=int, default=0, metavar="N", help="begin with this instance (default: 0)")
    parser.epilog = f"{_STATUS}, 130 after Ctrl-C."


def _add_timeout(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("--timeout-s", type=float, metavar="N", help=text)


def add_top_flags(parser: ArgumentParser) -> None:
    """Add the flags of `top`."""
    _add_service_flags(parser, "metrics", METRICS_KEY_VARIABLE)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--once",
        action="store_true",
        help="print the current state as plain text; the default if the output is no terminal",
    )
    shown.add_argument("--json", action="store_true", help="print the current state as JSON")
    shown.add_argument(
        "--no-color", action="store_true", help="use no colours; so does the variable NO_COLOR"
    )


def add_models_flags(parser: ArgumentParser) -> None:
    """Add the flags and the actions of `models`."""
    swapped = add_models_parsers(parser)["swap"]
    swapped.description = (
        f"{swapped.description} `--set` also says how it is judged, such as `--set policy=canary`."
    )


def add_models_parsers(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Add the actions of `models` with flags that need only the client; return their parsers."""
    adding = parser.add_subparsers(title="what to do", metavar="WHAT", dest="what", required=True)
    parsers = {}
    for what, text in (
        ("list", "list the models and their versions that serve"),
        ("versions", "list the versions of a model, and what became of each"),
        ("add", "load one more model"),
        ("remove", "answer what a model has accepted, and serve it no longer"),
        ("swap", "load another version of a model, which takes over if it is good enough"),
        ("rollback", "let the version that served before serve again"),
    ):
        each = parsers[what] = _add_parser(adding, what, text)
        if what != "list":
            each.add_argument("name", metavar="NAME", help="the name of the model")
        each.add_argument("--json", action="store_true", help="print what the service answers")
        _add_service_flags(each, "administration", ADMIN_KEY_VARIABLE)
        if what in ("add", "swap"):
            _add_model_settings(each)
        elif what == "remove":
            _add_ephemeral(each)
        if what not in ("list", "versions"):
            each.epilog = (
                "Ctrl-C leaves it going on. Exit status: 0 once it is done, 1 if it failed or was "
                "refused, 2 for wrong arguments."
            )
    return parsers


def _add_model_settings(parser: ArgumentParser) -> None:
    settings = parser.add_argument_group("settings of the model")
    settings.add_argument("--source", metavar="SOURCE", help="where its network comes from")
    settings.add_argument("--weights", metavar="WHICH", help="a name, a file, or none")
    settings.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other setting of a model, such as replicas=2; may be repeated. Paths are "
        "those of the host and the folder that the service runs in",
    )
    _add_ephemeral(settings)


def _add_ephemeral(parser: _ActionsContainer) -> None:
    parser.add_argument(
        "--ephemeral",
        action="store_true",
        default=None,
        help="Forget the change at the next start of the service.",
    )


def _add_parser(
    adding: "_SubParsersAction[ArgumentParser]", what: str, text: str
) -> ArgumentParser:
    parser = adding.add_parser(
        what, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(parser=parser)
    return parser


def _add_service_flags(parser: ArgumentParser, kind: str, key_variable: str) -> None:
    add_url_flag(parser)
    add_access_flags(parser, kind, key_variable)


def _add_job_parser(
    adding: "_SubParsersAction[ArgumentParser]", what: str, text: str
) -> ArgumentParser:
    parser = _add_parser(adding, what, text)
    _add_service_flags(parser, "predictions", PREDICT_KEY_VARIABLE)
    return parser
