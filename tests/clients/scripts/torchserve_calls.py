"""Calls TorchServe as its users do: by curl, or by requests (the argument "curl" or "requests")."""

import os
import subprocess
import sys

from telling import shown, tell

PHOTOS = os.environ["PHOTOS"]
KIND, ADDRESS = sys.argv[1:3]
BASE = f"http://{ADDRESS}"
CHELSEA = f"{PHOTOS}/chelsea.jpg"


def curl(call, *arguments):
    """Run curl, and tell the answer of a call."""
    command = ["curl", "-s", "-S", "-w", "\n%{http_code} %{content_type}", *arguments]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    body, _, line = done.stdout.decode(errors="replace").rpartition("\n")
    status, _, kind = line.partition(" ")
    tell(call, {"status": int(status), "headers": {"content-type": kind}, "text": body})


def requests_calls():
    """Call by requests."""
    import requests

    def told(call, method, path, **options):
        try:
            answer = requests.request(method, f"{BASE}{path}", timeout=60, **options)
        except requests.RequestException as error:
            tell(call, error=shown(error))
            return
        kind = answer.headers.get("content-type", "")
        # Not `text`: it asks chardet, since answers have no charset.
        text = answer.content.decode()
        tell(call, {"status": answer.status_code, "headers": {"content-type": kind}, "text": text})

    with open(CHELSEA, "rb") as file:
        picture = file.read()
    told("ping", "GET", "/ping")
    for name in ("data", "body"):
        told(f"files {name}", "POST", "/predictions/classes", files={name: picture})
        told(
            f"files {name}, named", "POST", "/predictions/classes",
            files={name: ("a.jpg", picture, "image/jpeg")},
        )  # fmt: skip
        told(f"data {name}", "POST", "/predictions/plain", data={name: "hello", "other": "é"})
    told("data", "POST", "/predictions/classes", data=picture)
    told("PUT", "PUT", "/predictions/classes", data=picture)
    told("json", "POST", "/predictions/numbers", json={"numbers": [1, 2, 3, 4]})
    told("bad json", "POST", "/predictions/numbers", json={"numbers": "none"})
    told("text", "POST", "/predictions/plain", data="hello", headers={"Content-Type": "text/plain"})
    told("version", "POST", "/predictions/plain/2.0", data="hello")
    told("no model", "POST", "/predictions/absent", data="hello")
    told("pieces", "POST", "/predictions/pieces", data="hello", stream=True)
    told("large", "POST", "/predictions/plain", data=b"x" * 150_000)
    told("parts", "POST", "/predictions/plain", data=iter([b"hel", b"lo"]))


def curl_calls():
    """Call by curl, as TorchServe's documentation does."""
    curl("ping", f"{BASE}/ping")
    curl("-T", f"{BASE}/predictions/classes", "-T", CHELSEA)
    curl("-X POST -T", "-X", "POST", f"{BASE}/predictions/classes", "-T", CHELSEA)
    curl("-F data", f"{BASE}/predictions/classes", "-F", f"data=@{CHELSEA}")
    curl("-F body", f"{BASE}/predictions/classes", "-F", f"body=@{CHELSEA}")
    curl("--data-binary", f"{BASE}/predictions/plain", "--data-binary", "hello")
    curl("-d JSON", f"{BASE}/predictions/numbers", "-H", "Content-Type: application/json",
         "-d", '{"numbers": [1, 2, 3, 4]}')  # fmt: skip
    curl("-d fields", f"{BASE}/predictions/plain", "-d", "data=hello", "-d", "more=é")
    curl("-F fields", f"{BASE}/predictions/plain", "-F", "data=hello", "-F", "more=é;type=text/csv")
    curl("invocations", "-X", "POST", f"{BASE}/invocations?model_name=plain", "-d", "data=hello")
    curl("predict", "-X", "POST", f"{BASE}/classes/predict", "-T", CHELSEA)
    curl("no model", "-X", "POST", f"{BASE}/predictions/absent", "-T", CHELSEA)
    curl("pieces", "-N", "-X", "POST", f"{BASE}/predictions/pieces", "-d", "data=hello")
    curl("no picture", f"{BASE}/predictions/classes", "-F", "data=no picture")


if KIND == "curl":
    curl_calls()
else:
    requests_calls()
