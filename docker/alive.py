"""Ask the service in this container whether it is alive: exit status 0 if so, else 1.

Run as `python -I -S alive.py [live|ready]`: that takes milliseconds, since engines run it often.
The variable INFERPOOL_PORT has the port.
"""

import os
import socket
import sys


def main() -> int:
    """Ask, print the status line or the error, and return the exit status."""
    what = sys.argv[1] if len(sys.argv) > 1 else "live"
    port = int(os.environ.get("INFERPOOL_PORT", "8000"))
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
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


def _encrypted(connection: socket.socket) -> socket.socket:
    """Return the connection under TLS; any certificate will do, as nothing leaves the container."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)


if __name__ == "__main__":
    raise SystemExit(main())
