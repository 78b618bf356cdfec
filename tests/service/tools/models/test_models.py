"""`inferpool models` with a real service, and with answers that are made up."""

import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest

from inferpool.service.catalog.requests import SwapOptions
from inferpool.service.cli.main import run
from inferpool.service.cli.parser import make_parser
from inferpool.service.tools.models import run as verb
from inferpool.service.tools.models.operator import AdminConnection
from inferpool.service.tools.models.plan import swap_flags
from tests.e2e.running import ROOT, Running, running
from tests.pty_screen import on_terminal
from tests.run_folders import TINY, write_run

KEY = "a-key-for-administration"
SOURCE = "tests.service.tools.models.scaled_model:ScaledModel"
MODEL = {"source": SOURCE, "replicas": 1}
QUICK = ("--wait-s", "0")
"""No client sends anything, so there is no live input to wait for."""


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    settings = {"models": {"cats": MODEL}}
    flags = ("--front-ends", "1")
    with running(*flags, settings=settings, env={"INFERPOOL_ADMIN_KEYS": KEY}) as service:
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
    _, out, _ = models("versions", "dogs")
    found = [re.split("  +", line)[:2] for line in out.splitlines()]
    assert found[0] == ["VERSION", "STATE"]
    assert found[1] in (["2", "leaving"], ["2", "rolled back"])
    assert found[2] == ["1", "serving"]
    _, out, _ = models("list")
    assert [line.split()[:3] for line in out.splitlines()][1:] == [
        ["cats", "1", "ready"],
        ["dogs", "1", "ready"],
    ]
    assert models("remove", "dogs") == (0, "dogs is removed\n", "")
    assert "dogs" not in models("list")[1]


def test_a_version_that_is_worse_is_refused_with_its_figures(models):
    worse = ("--set", 'options={"factor": -1}', *QUICK)
    status, out, err = models("swap", "cats", *worse)
    assert (status, out) == (1, "")
    assert "min_agreement is 99.00%" in err
    assert "figures: agreement 0.00%" in err
    assert "version 1 serves on" in err
    status, out, _ = models("swap", "cats", *worse, "--json")
    answer = json.loads(out)
    assert (status, answer["version"], answer["changes"][0]["state"]) == (1, 1, "failed")
    assert answer["versions"][0]["figures"]["agreement"] == 0


def test_a_model_that_cannot_be_loaded_is_a_failure_with_its_reason(models):
    status, out, err = models("add", "birds", "--source", "no_such_module:Birds")
    assert (status, out) == (1, "")
    assert "there is no module 'no_such_module'" in err
    assert "it is not served" in err


def test_an_unknown_model_is_named_with_the_nearest(models):
    for what in ("versions", "remove", "swap", "rollback"):
        status, _, err = models(what, "cast")
        assert status == 1
        assert "no model is called 'cast'" in err
        assert "did you mean cats?" in err


def test_json_is_what_the_service_answers(models):
    assert json.loads(models("list", "--json")[1])["models"][0]["name"] == "cats"
    assert json.loads(models("versions", "cats", "--json")[1])["version"] == 1
    status, out, err = models("versions", "cast", "--json")
    assert (status, json.loads(out)["code"]) == (1, "unknown_model")
    assert err


def test_a_wrong_key_and_a_service_without_administration_are_errors_with_advice(
    models, service: Running, monkeypatch, tmp_path
):
    monkeypatch.delenv("INFERPOOL_ADMIN_KEYS")
    status, _, err = models("list")
    assert status == 1
    assert "wants a key for administration: --key-file PATH" in err
    file = tmp_path / "key"
    file.write_text("another-key-of-sixteen\n")
    assert "wants another key" in models("list", "--key-file", str(file))[2]


def test_a_terminal_shows_how_it_goes_on_and_ctrl_c_leaves_it_going_on(service: Running):
    arguments = ("models", "swap", "cats", "--wait-s", "60", "--url", service.url)
    with on_terminal(*arguments, cwd=ROOT, columns=120) as screen:
        screen.wait_for("swap cats (")
        screen.wait_for("live inputs")
        screen.press("\x03")
        assert screen.leave() == 130
        assert b"the swap of cats goes on" in screen.written
    model = service.get("/admin/models/cats", headers={"x-api-key": KEY}).json()
    assert model["changes"][0]["state"] == "going_on"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "a b"], "cannot be a model's name"),
        (["add", "birds"], "is not a source"),
        (["swap", "cats", "--min-agreement", "7"], "--min-agreement: "),
        (["swap", "cats", "--min-agreement", "x"], "invalid float value"),
        (["swap", "cats", "--policy", "hope"], "invalid choice"),
        (["swap", "cats", "--min-agrement", "1"], "did you mean --min-agreement?"),
        (["swap", "cats", "--set", "replicas"], "is not KEY=VALUE"),
        (["swap", "cats", "--set", "replica=1"], "did you mean replicas?"),
        (["swap", "cats", "--set", "replicas=x"], "replicas: 'x' is not"),
        (["swap", "cats", "--set", "options=x"], "is not a JSON object"),
        (["list", "--url", "ftp://x"], "is not the address"),
        (["list", "--ca-file", "nowhere"], "nowhere"),
        (["lost"], "invalid choice"),
        ([], "WHAT"),
        (["swap", "cats", "nowhere"], "RUN: there is no folder 'nowhere' here; --source takes"),
        (["add", "cats", "echo"], "RUN: there is no folder 'echo' here; --source takes"),
        (["swap", "cats", "tests"], "RUN: tests is no folder of a finished training run"),
        (["swap", "cats", "tests", "--source", "echo"], "--source: tests is the source already"),
    ],
)
def test_wrong_arguments_are_named_and_exit_2(arguments, message, capsys):
    try:
        status = run(["models", *arguments])
    except SystemExit as left:
        status = left.code
    assert status == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") <= 2


def test_every_option_of_a_swap_has_a_flag_with_its_docstring_and_default():
    flags = {flag.name: flag for flag in swap_flags()}
    assert list(flags) == list(SwapOptions.model_fields)
    for name, field in SwapOptions.model_fields.items():
        assert flags[name].default == field.default
        assert flags[name].text == " ".join((field.description or "").split())
    assert flags["policy"].choices == ("verified", "shadow", "canary", "force")


def model(state: str, id: str = "7", **change: object) -> dict[str, object]:
    first = {"id": id, "kind": "swap", "state": state, "since": 1.0, "version": 2, **change}
    version = {"number": 1, "state": "serving", "source": "echo", "weights": "none", "since": 1.0}
    return {
        "name": "cats", "version": 1, "ready": True, "change": "swap: compared on 3 inputs",
        "versions": [version], "changes": [first],
    }  # fmt: skip


def problem(status: int, code: str, detail: str = "why") -> httpx.Response:
    return httpx.Response(status, json={"code": code, "detail": detail, "status": status})


Scripted = Sequence[httpx.Response | httpx.TransportError]


def follow(
    monkeypatch, capsys, script: Scripted, *arguments: str, asked: list[str] | None = None
) -> tuple[int, str, str]:
    """Run a command against answers in turn; the last is repeated."""
    left = list(script)

    def answer(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(
                f"{request.method} {request.url.raw_path.decode()} {request.content.decode()}"
            )
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, httpx.TransportError):
            raise found
        return httpx.Response(found.status_code, content=found.content)

    monkeypatch.setattr(verb, "_POLL_S", 0.001)
    monkeypatch.setattr(verb, "_LOST_S", 0.05)
    args = make_parser("models")[0].parse_args(["models", *arguments])
    operator = AdminConnection(
        "http://h", KEY, verb._tls_context(args), httpx.MockTransport(answer)
    )
    return verb.operate(operator, args, verb.body_of(args)), *capsys.readouterr()


BEGUN = httpx.Response(202, json=model("going_on"))


@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ([BEGUN, httpx.Response(200, json=model("done"))], 0, "version 2 serves"),
        ([httpx.Response(200, json=model("done") | {"saved": False})], 0, "which forgets it"),
        ([BEGUN, BEGUN, httpx.Response(200, json=model("failed", reason="bad"))], 1, "2: bad"),
        ([httpx.Response(200, json=model("done"))], 0, "version 2 serves"),
        ([BEGUN, httpx.Response(200, json=model("done", "8"))], 1, "nothing of this change"),
        ([BEGUN, problem(404, "unknown_model")], 1, "nothing of this change"),
        ([BEGUN, httpx.ConnectError("x"), httpx.Response(200, json=model("done"))], 0, "serves"),
        ([BEGUN, httpx.ConnectError("refused")], 1, "the swap may go on"),
        ([BEGUN, problem(503, "unavailable")], 1, "the swap may go on"),
        ([BEGUN, httpx.Response(200, json=model("failed", code="invalid_input"))], 2, "cats"),
        ([problem(409, "conflict", "is being changed already")], 1, "is being changed already"),
        ([problem(404, "not_found")], 1, "cannot be administered"),
        ([httpx.Response(404, text="<html>")], 1, "is no inferpool"),
        ([httpx.Response(200, json={"a": 1})], 1, "this version cannot read"),
        ([httpx.ReadTimeout("x")], 1, "does not answer"),
    ],
)
def test_a_change_is_followed_to_its_end_whatever_comes_between(
    monkeypatch, capsys, script, status, says
):
    found, out, err = follow(monkeypatch, capsys, script, "swap", "cats")
    assert found == status
    assert says in (out if status == 0 else err)


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
def test_figures_of_a_validation_and_of_clients_are_shown(monkeypatch, capsys, figures, says):
    known = {"number": 2, "state": "refused", "source": "echo", "weights": "none", "since": 1.0}
    seen = model("failed", reason="why") | {"versions": [known | {"figures": figures}]}
    found = follow(monkeypatch, capsys, [httpx.Response(200, json=seen)], "swap", "cats")
    assert says in found[2]
    assert (
        says in follow(monkeypatch, capsys, [httpx.Response(200, json=seen)], "versions", "cats")[1]
    )


def test_settings_that_the_service_cannot_use_are_wrong_arguments(monkeypatch, capsys):
    with pytest.raises(verb.FlagError, match="source: no"):
        follow(monkeypatch, capsys, [problem(422, "invalid_input", "source: no")], "swap", "cats")


def test_a_removal_is_done_when_the_model_is_not_there_any_more(monkeypatch, capsys):
    script = [BEGUN, BEGUN, problem(404, "unknown_model")]
    assert follow(monkeypatch, capsys, script, "remove", "cats")[:2] == (0, "cats is removed\n")


@pytest.mark.parametrize(
    ("arguments", "request_line"),
    [
        (["remove", "cats", "--ephemeral"], "DELETE /admin/models/cats?ephemeral=true "),
        (["remove", "cats"], "DELETE /admin/models/cats "),
        (["rollback", "a/../b"], "POST /admin/models/a%2F..%2Fb/rollback "),
        (
            ["swap", "cats", "--weights", "new.pth", "--min-agreement", "0.5", "--ephemeral"],
            "POST /admin/models/cats/versions "
            '{"weights":"new.pth","min_agreement":0.5,"ephemeral":true}',
        ),
        (
            ["add", "cats", "--source", "echo", "--set", "replicas=2", "--set", "weights=7"],
            'POST /admin/models {"name":"cats","source":"echo","replicas":2,"weights":"7"}',
        ),
        (
            ["swap", "cats", "--set", 'options={"x": "nan"}', "--policy", "force"],
            'POST /admin/models/cats/versions {"options":{"x":"nan"},"policy":"force"}',
        ),
    ],
)
def test_flags_become_the_call_that_they_mean(monkeypatch, capsys, arguments, request_line):
    asked: list[str] = []
    answers = [httpx.Response(200, json=model("done"))]
    assert follow(monkeypatch, capsys, answers, *arguments, asked=asked)[0] == 0
    assert asked == [request_line]


def test_a_run_is_its_source_and_what_it_is_judged_by(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_folder = str(write_run(tmp_path / "run", model=TINY))
    answers = [httpx.Response(200, json=model("done"))]

    def body_of(*arguments: str) -> dict[str, object]:
        asked: list[str] = []
        assert follow(monkeypatch, capsys, answers, *arguments, asked=asked)[0] == 0
        return dict(json.loads(asked[0].split(" ", 2)[2]))

    changed = {"source": run_folder, "weights": "DEFAULT", "options": {}}
    assert body_of("swap", "cats", "run/") == changed | {"validation": run_folder}
    assert body_of("swap", "cats", "run", "--validation", "/other") == changed | {
        "validation": "/other"
    }
    assert body_of("swap", "cats", "run", "--policy", "force", "--weights", "none") == {
        **changed, "weights": "none", "policy": "force"
    }  # fmt: skip
    assert body_of("swap", "cats", "/elsewhere/run/")["source"] == "/elsewhere/run"
    assert body_of("add", "dogs", "run") == {"name": "dogs", "source": run_folder}


def test_missing_service_is_an_error_with_advice(capsys):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    assert run(["models", "list", "--url", url.replace("//", "//me:secret@")]) == 1
    said = capsys.readouterr().err
    assert f"no service answers at {url}" in said
    assert "inferpool models list --url" in said
