"""`inferpool models` with a real service, and with answers that are made up."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from inferpool.service.cli.main import INFERPOOL, run
from inferpool.service.client.cli import models as verb
from inferpool.service.client.cli.access import tls_context
from inferpool.service.client.cli.admin import AdminConnection
from inferpool.service.settings.names import FlagError
from inferpool.service.tools.models.run import body_of
from tests.e2e.running import ROOT, Running, running
from tests.ports import free_port
from tests.pty_screen import on_terminal
from tests.run_folders import TINY, write_run

KEY = "a-key-for-administration"
SOURCE = "tests.service.tools.models.scaled_model:ScaledModel"
QUICK = ("--wait-s", "0")
"""No client sends anything, so there is no live input to wait for."""


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    settings = {"models": {"cats": {"source": SOURCE, "replicas": 1}}}
    env = {"INFERPOOL_ADMIN_KEYS": KEY}
    with running("--front-ends", "1", settings=settings, env=env) as service:
        yield service


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERPOOL_ADMIN_KEYS", KEY)


@pytest.fixture
def models(service: Running, capsys) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(["models", *arguments, "--url", service.url])
        return status, *capsys.readouterr()

    return call


def test_a_model_is_added_swapped_rolled_back_and_removed(models, service: Running):
    added = models(
        "add", "dogs", "--source", SOURCE, "--set", 'options={"factor": 2}', "--set", "replicas=1"
    )
    assert added == (0, "dogs: version 1 serves\n", "")
    assert service.ask([1, 2, 3], path="/predict/dogs").json()["predictions"] == [[2.0, 4.0, 6.0]]
    status, out, _ = models("swap", "dogs", *QUICK, "--set", 'options={"factor": 2.01}')
    assert (status, out.partition(" (")[0]) == (0, "dogs: version 2 serves")
    assert "agreement 100.00%, deviation 0.005" in out
    assert models("rollback", "dogs") == (0, "dogs: version 1 serves\n", "")
    head, newest, oldest = [line.split() for line in models("versions", "dogs")[1].splitlines()]
    assert head[:2] == ["VERSION", "STATE"]
    assert newest[:2] in (["2", "leaving"], ["2", "rolled"])
    assert oldest[:2] == ["1", "serving"]
    rows = [line.split()[:3] for line in models("list")[1].splitlines()]
    assert rows[1:] == [["cats", "1", "ready"], ["dogs", "1", "ready"]]
    assert models("remove", "dogs") == (0, "dogs is removed\n", "")
    assert "dogs" not in models("list")[1]


def test_a_version_that_is_worse_is_refused_with_its_figures(models):
    worse = ("--set", 'options={"factor": -1}', *QUICK)
    status, out, err = models("swap", "cats", *worse)
    assert (status, out) == (1, "")
    for piece in ("min_agreement is 99.00%", "figures: agreement 0.00%", "version 1 serves on"):
        assert piece in err
    status, out, _ = models("swap", "cats", *worse, "--json")
    answer = json.loads(out)
    assert (status, answer["version"], answer["changes"][0]["state"]) == (1, 1, "failed")
    assert answer["versions"][0]["figures"]["agreement"] == 0


def test_what_cannot_be_done_says_why(models, monkeypatch, tmp_path: Path):
    status, out, err = models("add", "birds", "--source", "no_such_module:Birds")
    assert (status, out) == (2, "")
    assert "source: there is no module 'no_such_module'" in err
    status, out, err = models("add", "birds", "--source", "tests.no_such_module:Birds")
    assert (status, out) == (1, "")
    assert "there is no module 'tests.no_such_module'" in err
    assert "it is not served" in err
    for what in ("versions", "remove", "swap", "rollback"):
        status, _, err = models(what, "cast")
        assert (status, "did you mean cats?" in err) == (1, True)
    status, out, err = models("versions", "cast", "--json")
    assert (status, json.loads(out)["code"]) == (1, "unknown_model")
    monkeypatch.delenv("INFERPOOL_ADMIN_KEYS")
    status, _, err = models("list")
    assert (status, "wants a key for administration: --key-file PATH" in err) == (1, True)
    (tmp_path / "key").write_text("another-key-of-sixteen\n")
    assert "wants another key" in models("list", "--key-file", str(tmp_path / "key"))[2]


def test_a_terminal_shows_how_it_goes_on_and_ctrl_c_leaves_it_going_on(service: Running):
    arguments = ("models", "swap", "cats", "--wait-s", "600", "--url", service.url)
    with on_terminal(*arguments, cwd=ROOT, columns=120) as screen:
        screen.wait_for("swap cats (")
        screen.wait_for("live inputs")
        screen.press("\x03")
        assert screen.leave() == 130
        assert b"the swap of cats goes on" in screen.written
    model = service.get("/admin/models/cats", headers={"x-api-key": KEY}).json()
    assert model["changes"][0]["state"] == "going_on"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("add birds", "is not a source"),
        ("swap cats --min-agreement 7", "--min-agreement: "),
        ("swap cats --set replicas", "is not KEY=VALUE"),
        ("swap cats --set replica=1", "did you mean replicas?"),
        ("swap cats --set replicas=x", "replicas: 'x' is not"),
        ("swap cats --set options=x", "is not a JSON object"),
        ("list --url ftp://x", "is not the address"),
        ("list --ca-file nowhere", "nowhere"),
        ("swap cats nowhere", "RUN: there is no folder 'nowhere' here; --source takes"),
        ("add cats echo", "RUN: there is no folder 'echo' here; --source takes"),
        ("swap cats tests", "RUN: tests is no folder of a finished training run"),
        ("swap cats tests --source echo", "--source: tests is the source already"),
    ],
)
def test_wrong_arguments_are_named_and_exit_2(line: str, message: str, capsys):
    try:
        status = run(["models", *line.split()])
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") <= 2


VERSION = {"number": 1, "state": "serving", "source": "echo", "weights": "none", "since": 1.0}


def seen(
    state: str, *, versions: Sequence[object] = (VERSION,), **change: object
) -> httpx.Response:
    """Return what the service says of a model, whose change 7 goes on or has ended."""
    change = {"id": "7", "kind": "swap", "state": state, "since": 1.0, "version": 2, **change}
    about = {"name": "cats", "version": 1, "ready": True, "change": "swap: compared on 3 inputs"}
    return httpx.Response(200, json={**about, "versions": versions, "changes": [change]})


def problem(status: int, code: str, detail: str = "why") -> httpx.Response:
    return httpx.Response(status, json={"code": code, "detail": detail, "status": status})


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def follow(capsys) -> Ask:
    """Run a command against answers in turn, of which the last is repeated; keep the calls."""

    def call(
        script: Sequence[httpx.Response | httpx.TransportError], *arguments: str,
        lost_s: float = 600.0, asked: list[str] | None = None,
    ) -> tuple[int, str, str]:  # fmt: skip
        left = list(script)

        def answer(request: httpx.Request) -> httpx.Response:
            if asked is not None:
                path = request.url.raw_path.decode()
                asked.append(f"{request.method} {path} {request.content.decode()}")
            found = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(found, httpx.TransportError):
                raise found
            return httpx.Response(found.status_code, content=found.content)

        args = INFERPOOL.make_parser("models")[0].parse_args(["models", *arguments])
        transport = httpx.MockTransport(answer)
        operator = AdminConnection("http://h", KEY, tls_context(verify=True), transport)
        pace = verb.FollowPace(poll_s=0.001, lost_s=lost_s)
        return verb.operate(operator, args, body_of(args), pace), *capsys.readouterr()

    return call


BEGUN, DONE = seen("going_on"), seen("done")
FORGETS = httpx.Response(200, json=DONE.json() | {"saved": False})


@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ([DONE], 0, "version 2 serves"),
        ([FORGETS], 0, "which forgets it"),
        ([BEGUN, BEGUN, seen("failed", reason="bad")], 1, "2: bad"),
        ([BEGUN, seen("done", id="8")], 1, "nothing of this change"),
        ([BEGUN, problem(404, "unknown_model")], 1, "nothing of this change"),
        ([BEGUN, httpx.ConnectError("x"), problem(503, "unavailable"), DONE], 0, "serves"),
        ([BEGUN, seen("failed", code="invalid_input")], 2, "cats"),
        ([problem(409, "conflict", "is being changed already")], 1, "is being changed already"),
        ([problem(404, "not_found")], 1, "cannot be administered"),
        ([httpx.Response(404, text="<html>")], 1, "is no inferpool"),
        ([httpx.Response(200, json={"a": 1})], 1, "this version cannot read"),
        ([httpx.ReadTimeout("x")], 1, "does not answer"),
    ],
)
def test_a_change_is_followed_to_its_end_whatever_comes_between(
    follow: Ask, script, status: int, says: str
):
    found, out, err = follow(script, "swap", "cats")
    assert found == status
    assert says in (out if status == 0 else err)


@pytest.mark.parametrize("trouble", [httpx.ConnectError("x"), problem(503, "unavailable")])
def test_a_service_that_is_silent_for_long_is_given_up(follow: Ask, trouble):
    status, _, err = follow([BEGUN, trouble], "swap", "cats", lost_s=0.01)
    assert (status, "the swap may go on" in err) == (1, True)


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (
            {"num_validated": 20, "accuracy": 0.95, "accuracy_before": 1.0},
            "accuracy 95.00%, accuracy before 100.00%, validated on 20 inputs",
        ),
        (
            {"num_answered": 800, "fault_share": 0.01, "fault_share_before": 0.0},
            "faults on 1.00% of 800 inputs of clients, 0.00% before",
        ),
        ({"live_latency_ratio": 3.0}, "3.00 times as long for clients"),
    ],
)
def test_figures_of_a_validation_and_of_clients_are_shown(follow: Ask, figures, says: str):
    refused = VERSION | {"number": 2, "state": "refused", "figures": figures}
    script = [seen("failed", reason="why", versions=[refused])]
    assert says in follow(script, "swap", "cats")[2]
    assert says in follow(script, "versions", "cats")[1]


def test_settings_that_the_service_cannot_use_are_wrong_arguments(follow: Ask):
    with pytest.raises(FlagError, match="source: no"):
        follow([problem(422, "invalid_input", "source: no")], "swap", "cats")


def test_a_removal_is_done_when_the_model_is_not_there_any_more(follow: Ask):
    script = [BEGUN, BEGUN, problem(404, "unknown_model")]
    assert follow(script, "remove", "cats")[:2] == (0, "cats is removed\n")


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("remove cats --ephemeral", "DELETE /admin/models/cats?ephemeral=true "),
        ("remove cats", "DELETE /admin/models/cats "),
        ("rollback a/../b", "POST /admin/models/a%2F..%2Fb/rollback "),
        (
            "swap cats --weights new.pth --min-agreement 0.5 --ephemeral",
            "POST /admin/models/cats/versions "
            '{"weights":"new.pth","min_agreement":0.5,"ephemeral":true}',
        ),
        (
            "add cats --source echo --set replicas=2 --set weights=7",
            'POST /admin/models {"name":"cats","source":"echo","replicas":2,"weights":"7"}',
        ),
        (
            'swap cats --set options={"x":"nan"} --policy force',
            'POST /admin/models/cats/versions {"options":{"x":"nan"},"policy":"force"}',
        ),
    ],
)
def test_flags_become_the_call_that_they_mean(follow: Ask, line: str, call: str):
    asked: list[str] = []
    assert follow([DONE], *line.split(), asked=asked)[0] == 0
    assert asked == [call]


def test_a_run_is_its_source_and_what_it_is_judged_by(follow: Ask, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    folder = str(write_run(tmp_path / "run", model=TINY))
    swapped = {"source": folder, "weights": "DEFAULT", "options": {}}
    for line, body in (
        ("swap cats run/", swapped | {"validation": folder}),
        ("swap cats run --validation /other", swapped | {"validation": "/other"}),
        (
            "swap cats run --policy force --weights none",
            swapped | {"weights": "none", "policy": "force"},
        ),
        ("add dogs run", {"name": "dogs", "source": folder}),
        (
            "swap cats /elsewhere/run/",
            swapped | {"source": "/elsewhere/run", "validation": "/elsewhere/run"},
        ),
    ):
        asked: list[str] = []
        assert follow([DONE], *line.split(), asked=asked)[0] == 0
        assert json.loads(asked[0].split(" ", 2)[2]) == body


def test_missing_service_is_an_error_with_advice(capsys):
    address = f"127.0.0.1:{free_port()}"
    assert run(["models", "list", "--url", f"http://me:secret@{address}"]) == 1
    said = capsys.readouterr().err
    assert f"no service answers at http://{address}" in said
    assert "inferpool models list --url" in said
