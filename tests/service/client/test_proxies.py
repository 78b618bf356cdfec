"""Proxies of the environment: none for this host, and each is named where a call fails."""

import ast
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferpool.service.cli.main import run
from inferpool.service.client import Client
from inferpool.service.client.proxies import UnusableProxyError, way_to
from tests.e2e.running import Running

ROOT = Path(__file__).parents[3]
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """Run a proxy that refuses everything; yield its address and the lines that it was sent."""
    asked: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(1 << 16).partition(b"\r\n")[0])
                connection.sendall(
                    b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nConnection: close\r\n\r\nNo"
                )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)


ODD = {
    "a proxy that is gone": {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "127.0.0.1:9"},
    "socks without its package": {"ALL_PROXY": "socks5://127.0.0.1:9"},
    "no URL": {"HTTP_PROXY": "http://[no", "ALL_PROXY": "ftp://x", "HTTPS_PROXY": "::"},
    "an odd exemption": {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "[::1],10.0.0.0/8,x:y,,["},
}


def test_no_command_has_a_proxy_for_this_host(
    service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.jsonl").write_text('{"instance": 1}\n')
    at = ("--url", service.url)
    commands = (
        (["predict", "--text", "one", "--model", "echo", *at], 0),
        (["batch", f"{tmp_path}/*.txt", "--readers", "0", "--model", "echo", *at], 0),
        (["jobs", "list", *at], 0),
        (["top", "--once", *at], 0),
        (["models", "list", *at], 1),  # it has no keys for administration
        (["doctor", "--cluster", service.url], 1),  # it is none
    )
    for (argv, expected), odd in itertools.product(commands, ODD):
        with monkeypatch.context() as patch:
            for name, value in ODD[odd].items():
                patch.setenv(name, value)
            status = run(argv)
        out, err = capsys.readouterr()
        assert status == expected, (argv, odd, err)
        assert "PROXY" not in out + err


def test_a_proxy_that_refuses_is_named(proxy, monkeypatch, tmp_path: Path, capsys):
    url, asked = proxy
    monkeypatch.setenv("HTTP_PROXY", url)
    (tmp_path / "a.txt").write_text("text")
    brief = ("--text", "one", "--timeout-s", "0.5")
    for argv in (
        ["predict", *brief],
        ["jobs", "list"],
        ["batch", f"{tmp_path}/*.txt", "--readers", "0"],
    ):
        assert run([*argv, "--url", "http://service.example"]) not in (0, 2)
        out, err = capsys.readouterr()
        assert f"the proxy {url} (HTTP_PROXY; NO_PROXY names hosts" in out + err
        assert b"http://service.example/" in asked[-1]
    assert run(["predict", *brief, "--url", "https://service.example"]) == 1
    assert "HTTP_PROXY" not in capsys.readouterr().err  # that is for https alone
    monkeypatch.setenv("HTTPS_PROXY", url)
    assert run(["predict", *brief, "--url", "https://service.example"]) == 1
    err = capsys.readouterr().err
    assert f"no answer from https://service.example through the proxy {url} (HTTPS_PROXY" in err


@pytest.mark.parametrize("verb", ["predict", "batch", "jobs"])
def test_a_proxy_that_cannot_be_used_is_a_sentence(verb, monkeypatch, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    argv = {
        "predict": ["predict", "--text", "one"],
        "batch": ["batch", f"{tmp_path}/*.txt", "--readers", "0"],
        "jobs": ["jobs", "list"],
    }[verb]
    for name, value, said in (
        ("ALL_PROXY", "socks5://u:secret@h:1", "it needs the package socksio (`pip install"),
        ("ALL_PROXY", "ftp://h:1", "a proxy's URL begins with one of http://"),
        ("http_proxy", "http://[h", "http_proxy: http://[h cannot be used: "),
        ("http_proxy", "http://a..b:1", "http://a..b:1 cannot be used: its host name is not valid"),
        ("http_proxy", "http://\uff11.b", "its host name is not valid"),
        ("http_proxy", "http://a\tb:1", "it has spaces or control characters"),
        ("http_proxy", "http://u:sec/ret@h:1", "write /, ? and # in its password as %2F"),
        ("http_proxy", "http://h:99999", "its port is not "),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert run([*argv, "--url", "http://service.example"]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert f"inferpool {verb}: {name}: " in err
        assert "secret" not in err
        assert "NO_PROXY" in err


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        ("http://a.example", {"http_proxy": "p:1", "HTTP_PROXY": "q:1"}, "http://p:1"),
        ("http://a.example", {"HTTP_PROXY": "q:1", "REQUEST_METHOD": "GET"}, None),
        ("https://a.example", {"HTTP_PROXY": "q:1"}, None),
        ("https://a.example", {"ALL_PROXY": "https://q:1"}, "https://q:1"),
        ("http://a.example", {"ALL_PROXY": "q", "NO_PROXY": "*"}, None),
        ("http://a.example", {"ALL_PROXY": "q", "NO_PROXY": "b.example, .example"}, None),
        ("http://a.example", {"ALL_PROXY": "q", "NO_PROXY": "ample"}, "http://q"),
        ("http://a.example:81", {"ALL_PROXY": "q", "NO_PROXY": "a.example:80"}, "http://q"),
        ("http://a.example:80", {"ALL_PROXY": "q", "NO_PROXY": "A.example:80"}, None),
        ("http://10.1.2.3", {"ALL_PROXY": "q", "NO_PROXY": "10.0.0.0/8"}, None),
        ("http://[fd00::1]:80", {"ALL_PROXY": "q", "NO_PROXY": "fd00::/8"}, None),
        ("http://[fd00::1]:80", {"ALL_PROXY": "q", "NO_PROXY": "[fd00::1]:80"}, None),
        ("http://11.1.2.3", {"ALL_PROXY": "q", "NO_PROXY": "10.0.0.0/8"}, "http://q"),
        ("http://127.8.9.1", {"ALL_PROXY": "q"}, None),
        ("http://[::1]:8000", {"ALL_PROXY": "q"}, None),
        ("http://0.0.0.0:8000", {"ALL_PROXY": "q"}, None),
        ("http://LocalHost:8000", {"ALL_PROXY": "q"}, None),
        ("http://localhost.example", {"ALL_PROXY": "q"}, "http://q"),
        ("http://localhost.:8000", {"ALL_PROXY": "q"}, None),
        ("http://localhost.localdomain", {"ALL_PROXY": "q"}, None),
        ("http://127.1:8000", {"ALL_PROXY": "q"}, None),
        ("http://[::ffff:127.0.0.1]:8000", {"ALL_PROXY": "q"}, None),
        ("http://10.1", {"ALL_PROXY": "q", "NO_PROXY": "10.0.0.1"}, None),
        ("https://a.example", {"ALL_PROXY": "q", "NO_PROXY": "a.example:443"}, None),
        ("http://a.example", {"ALL_PROXY": "q", "NO_PROXY": "a.example:443"}, "http://q"),
        ("http://a.example", {"ALL_PROXY": "q", "NO_PROXY": "b.example a.example."}, None),
        ("http://a.example", {"ALL_PROXY": "q", "NO_PROXY": "http://a.example/"}, None),
        ("http://[fd00::1]", {"ALL_PROXY": "q", "NO_PROXY": "[fd00::]/8"}, None),
        ("http://[fd00::1]:81", {"ALL_PROXY": "q", "NO_PROXY": "[fd00::1]:80"}, "http://q"),
        ("http://10.1.2.3:81", {"ALL_PROXY": "q", "NO_PROXY": "10.1.2.3:80,10.1.2.4"}, "http://q"),
        ("http://10.1.2.3:81", {"ALL_PROXY": "q", "NO_PROXY": "10.1.2.3:81"}, None),
        ("http://a.example", {"ALL_PROXY": "http://u:p p@q"}, "http://u:p p@q"),
    ],
)
def test_the_way_is_that_of_curl(url, environ, expected):
    assert way_to(url, None, environ).proxy == expected
    assert way_to(url, "", environ).proxy is None
    assert way_to(url, "http://own:1", environ).proxy == "http://own:1"


def test_a_client_refuses_a_proxy_or_a_host_that_it_cannot_use():
    with pytest.raises(UnusableProxyError, match="socksio"):
        Client(proxy="socks5://h:1")
    for host in ("a..b", "a" * 64, ".a"):  # a look-up raises a `UnicodeError` for them
        with pytest.raises(ValueError, match="its host name is not valid"):
            Client(f"http://{host}:1")


def test_one_module_makes_the_clients_of_all_that_asks():
    made: dict[str, set[str]] = {}
    asking = ("cli", "client", "batch", "tools", "parts/tracing", "train", "embedded")
    paths = [path for folder in asking for path in (ROOT / "service" / folder).rglob("*.py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "httpx." in ast.unparse(node.func):
                made.setdefault(ast.unparse(node.func), set()).add(path.name)
    for name in ("Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport"):
        assert made[f"httpx.{name}"] == {"connecting.py"}
