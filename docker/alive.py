"""Ask the service in this container whether it is alive: exit status 0 if so, else 1.

Run as `python -I -S alive.py [live|ready]`: that takes milliseconds, since engines run it often.
The port is in the flag --port of the container's command, in INFERPOOL_PORT, or in the variable of
a platform, as for the service itself.

An agent answers no calls. `alive.py joined PORT` looks whether it is connected to the cluster port
of a front end, and `alive.py agent PORT` whether it has noticed each end of such a connection.
"""

import os
import socket
import sys

_COMMAND = "/proc/1/cmdline"
"""The container's command, also below an init process."""
_PORTS = ("INFERPOOL_PORT", "AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT")
"""Variables with the port, those that win first; see `service/settings/platforms.py`."""
_PORT = 8000
"""The port in this image, unless PORT says otherwise."""
_SAGEMAKER_PORT = 8080
"""The port where SageMaker runs this container without a variable."""
_CONNECTED, _CLOSED_BY_OTHER = 1, 8
"""States of connections in /proc/net/tcp: ESTABLISHED and CLOSE_WAIT of Linux."""


def main() -> int:
    """Ask, print the status line or the error, and return the exit status."""
    what = sys.argv[1] if len(sys.argv) > 1 else "live"
    if what in ("joined", "agent"):
        return _look_at_agent(what, int(sys.argv[2]))
    try:
        with _connected() as connection:
            if os.environ.get("INFERPOOL_TLS_CERTIFICATE"):
                connection = _encrypted(connection)
            request = f"GET /health/{what} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode())
            answer = connection.recv(64)
    except OSError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    status_line = answer.partition(b"\r\n")[0].decode("latin-1")
    sys.stdout.write(f"{status_line}\n")
    return 0 if status_line.split()[1:2] == ["200"] else 1


def _connected() -> socket.socket:
    """Connect to the service."""
    # Kubernetes gives a service called "inferpool" INFERPOOL_PORT=tcp://10.0.0.1:80.
    given = [text for name in _PORTS if (text := os.environ.get(name, "")).isdigit()]
    if texts := _in_command() or given[:1]:
        ports = [int(texts[-1])]
    else:
        port = os.environ.get("PORT", "")
        ports = [_SAGEMAKER_PORT, int(port) if port.isdigit() else _PORT]
    while True:
        try:
            return socket.create_connection(("127.0.0.1", ports.pop()), timeout=3)
        except ConnectionRefusedError:
            if not ports:
                raise


def _in_command() -> "list[str]":
    """Return the ports in the flags of the container's command; the last one wins."""
    try:
        with open(_COMMAND) as file:
            words = file.read().replace("--port=", "--port\0").split("\0")
    except (OSError, ValueError):
        return []
    values = [words[place] for place in range(1, len(words)) if words[place - 1] == "--port"]
    return [text for text in values if text.isdigit()]


def _look_at_agent(what: str, port: int) -> int:
    """Look at the connections of this container, of which the agent has the only one to the port.

    Whoever has been hung up on closes its end at once, unless it hangs.
    """
    states = _states_to(port)
    if what == "joined":
        is_well = _CONNECTED in states
        sys.stdout.write("joined\n" if is_well else f"not connected to a port {port}\n")
    else:
        is_well = _CLOSED_BY_OTHER not in states
        sys.stdout.write("alive\n" if is_well else "it does not notice that it was hung up on\n")
    return 0 if is_well else 1


def _states_to(port: int) -> "set[int]":
    """Return the states of all connections to a port, on whatever host."""
    states = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name) as file:
                lines = file.readlines()[1:]
        except OSError:  # without IPv6 the second one is not there
            continue
        for line in lines:
            _, _, remote, state = line.split()[:4]
            if int(remote.rpartition(":")[2], 16) == port:
                states.add(int(state, 16))
    return states


def _encrypted(connection: socket.socket) -> socket.socket:
    """Return the connection under TLS; any certificate will do, as nothing leaves the container."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)


if __name__ == "__main__":
    raise SystemExit(main())
