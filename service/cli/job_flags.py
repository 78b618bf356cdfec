"""Flags of the verb `jobs`. Its `--help` imports this, so it imports little."""

from argparse import ArgumentParser, _SubParsersAction
from pathlib import Path

from inferpool.service.cli.flags import PREDICT_KEY_VARIABLE, add_parameter_flag
from inferpool.service.settings.address import add_access_flags, add_url_flag

STATES = ("queued", "running", "succeeded", "failed", "cancelled")
_STATUS = (
    "Exit status: 0 if each instance has a prediction, 4 if some have none, 1 if a job failed, was "
    "cancelled or cannot be found, 2 for wrong arguments"
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of `jobs`, and what it can do."""
    adding = parser.add_subparsers(title="what to do", metavar="WHAT", dest="what", required=True)
    _add_submit(_add(adding, "submit", "hand inputs to the service as a job, and print its id"))
    listed = _add(adding, "list", "list jobs, the newest first")
    listed.add_argument(
        "--state", action="append", default=[], choices=STATES,
        help="list jobs in this state only; may be repeated",
    )  # fmt: skip
    listed.add_argument(
        "--limit", type=int, default=100, metavar="N", help="the most jobs (default: 100)"
    )
    listed.add_argument("--json", action="store_true", help="print a line of JSON for each job")
    shown = _add(adding, "show", "show a job")
    shown.add_argument("id", metavar="ID", help="the id of the job")
    shown.add_argument("--json", action="store_true", help="print what the service answers")
    _add_result(_add(adding, "result", "print the predictions of a job, a line of JSON for each"))
    waited = _add(adding, "wait", "wait until jobs are over, and show how they go on")
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
        ended = _add(adding, what, text)
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
        "arguments; with --wait or --result that of `inferpool jobs wait`."
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


def _add(adding: "_SubParsersAction[ArgumentParser]", what: str, text: str) -> ArgumentParser:
    parser = adding.add_parser(
        what, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(parser=parser)
    add_url_flag(parser)
    add_access_flags(parser, "predictions", PREDICT_KEY_VARIABLE)
    return parser
