"""docker/alive.py, the health check that a container engine runs."""

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.certificates import make_certificate
from tests.e2e.running import ROOT
from tests.ports import free_port


def ask(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(ROOT / "docker" / "alive.py"), *arguments]
    return subprocess.run(command, capture_output=True, env=variables, text=True, timeout=240)


@contextmanager
def answering(line: str, context: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[str]]]:
    """Answer one call with a status line; yields the port, and what was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[str] = []

    def answer() -> None:
        connection, _ = listener.accept()
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        with connection:
            asked.append(connection.recv(4096).decode().partition(" HTTP")[0])
            connection.sendall(f"{line}\r\nContent-Length: 0\r\n\r\n".encode())

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield str(listener.getsockname()[1]), asked
    finally:
        thread.join(60)
        listener.close()


@pytest.mark.parametrize(
    ("line", "status"), [("HTTP/1.1 200 OK", 0), ("HTTP/1.1 503 Service Unavailable", 1)]
)
def test_its_exit_status_follows_the_answer_of_the_service(line, status):
    with answering(line) as (port, asked):
        done = ask("ready", INFERPOOL_PORT=port)
    assert asked == ["GET /health/ready"]
    assert (done.returncode, done.stdout) == (status, f"{line}\n")


def test_it_speaks_tls_if_the_service_does(tmp_path):
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with answering("HTTP/1.1 200 OK", context) as (port, asked):
        done = ask(INFERPOOL_PORT=port, INFERPOOL_TLS_CERTIFICATE=str(certificate))
    assert (asked, done.returncode) == (["GET /health/live"], 0)


def test_it_fails_if_nobody_listens():
    done = ask(INFERPOOL_PORT=str(free_port()))
    assert done.returncode == 1
    assert "refused" in done.stdout


@pytest.mark.parametrize("name", ["AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT", "PORT"])
def test_it_finds_the_port_in_the_variable_of_a_platform(name):
    with answering("HTTP/1.1 200 OK") as (port, asked):
        done = ask(**{name: port, "INFERPOOL_PORT": "tcp://10.0.0.1:80"})
    assert (asked, done.returncode) == (["GET /health/live"], 0)


def test_a_flag_of_the_containers_command_wins_over_variables(tmp_path):
    source = (ROOT / "docker" / "alive.py").read_text()
    command, script = tmp_path / "cmdline", tmp_path / "alive.py"
    script.write_text(source.replace("/proc/1/cmdline", str(command)))
    for flag in ("--port\0{}", "--port=1\0--port={}", "--port\0{}\0--page"):
        with answering("HTTP/1.1 200 OK") as (port, asked):
            words = f"docker-init\0--\0inferpool\0serve\0{flag.format(port)}\0"
            command.write_text(words)
            variables = {"INFERPOOL_PORT": "1", "PORT": "1"}
            done = subprocess.run([sys.executable, "-I", "-S", str(script)], env=variables)
        assert (asked, done.returncode) == (["GET /health/live"], 0)


def test_an_agent_has_joined_while_it_is_connected_and_hangs_if_it_misses_the_end():
    with socket.create_server(("127.0.0.1", 0)) as front_end:
        port = front_end.getsockname()[1]

        def statuses() -> list[int]:
            return [ask(what, str(port)).returncode for what in ("joined", "agent")]

        assert statuses() == [1, 0]
        with socket.create_connection(("127.0.0.1", port)) as agent:
            connection, _ = front_end.accept()
            assert statuses() == [0, 0]
            connection.close()
            assert agent.recv(1) == b""
            assert statuses() == [1, 1]
        assert statuses() == [1, 0]
