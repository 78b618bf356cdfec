"""Services behind proxies: under a path, over two front ends, and with headers made up by clients.

Linux lets a client on this host come from any address of 127.0.0.0/8, so that one may be a trusted
proxy and another one may not.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferpool import Client
from tests.e2e.nginx import needs_nginx, nginx
from tests.e2e.running import ROOT, Running, running, until
from tests.ports import free_port

PROXY, CLIENT = "127.0.0.2", "127.0.0.1"
ADMIN = "admin-0123456789"
PAGE = (ROOT / "docs" / "deployment.md").read_text()
BODY = b'{"instances": [1]}'
TEXT = {"content-type": "application/json"}
BROWSER = {"accept": "text/html,*/*;q=0.8"}
"""At "/" a browser gets the page, and a program another answer."""
ASKS = (
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/docs/"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("GET", "/health/live/"),
    ("GET", "/jobs?limit=1"),
    ("PUT", "/jobs/mine/"),
    ("POST", "/predict"),
    ("POST", "/predict/echo/"),
    ("GET", "/predict/echo"),
    ("POST", "/admin/drain/"),
    ("GET", "/admin/settings"),
)
OF_A_CALL = {"date", "server-timing", "traceparent"}
OF_ADDRESSES = {"location", "link", "etag", "content-length", "content-security-policy", "vary"}
NAMES = st.sampled_from(
    [
        *("X-Forwarded-Proto", "X-Forwarded-Host", "X-Forwarded-Prefix", "X-Forwarded-For"),
        *("X-Forwarded-Port", "X-Forwarded-Server", "X-Forwarded-Path", "Forwarded", "X-Real-IP"),
        *("X-Original-URL", "X-Rewrite-URL", "X-Script-Name", "X-Forwarded-Ssl"),
        *("X-Inferpool-Client", "X-Inferpool-Scheme", "X-Original-Host", "CF-Connecting-IP"),
    ]
)
VALUES = st.one_of(
    st.sampled_from(
        [
            *("https", "HTTPS", "http", "wss", "javascript", "example.org", "[::1]:99"),
            *("127.0.0.1", "127.0.0.1 80", "::1", "/models", "/a/b/", "//evil", "/a/../b"),
            *("/%2e%2e/x", '/"><script>', "a@b", "for=127.0.0.1;proto=https", "h:99999", "/", ""),
        ]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"))
    .map(lambda text: text.strip())
    .filter(lambda text: len(text) < 99),
)
Spoofs = Sequence[tuple[str, str]]
SPOOFS = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=5)
ALL_THREE = [
    ("X-Forwarded-Proto", "https"),
    ("X-Forwarded-Host", "example.org"),
    ("X-Forwarded-Prefix", "/models"),
]


class Peers:
    """Clients of a service at several addresses of this host."""

    def __init__(self, service: Running) -> None:
        self.service = service
        self._clients = {
            address: httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60)
            for address in (PROXY, CLIENT)
        }
        self._plain: dict[tuple[str, str], httpx.Response] = {}

    def ask(self, peer: str, method: str, path: str, more: Spoofs = ()) -> httpx.Response:
        """Ask from an address, with more headers."""
        has_body = method in ("POST", "PUT")
        headers = [
            *((b"x-request-id", b"r"), (b"accept-encoding", b"identity")),
            *((name.encode(), value.encode()) for name, value in BROWSER.items()),
            *([(b"content-type", b"application/json")] if has_body else []),
            *((name.encode(), value.encode("latin-1")) for name, value in more),
        ]
        url, content = self.service.url + path, BODY if has_body else None
        return self._clients[peer].request(method, url, headers=headers, content=content)

    def plain(self, method: str, path: str) -> httpx.Response:
        """Return the answer to a client that sends no more headers."""
        if (method, path) not in self._plain:
            self._plain[method, path] = self.ask(CLIENT, method, path)
        return self._plain[method, path]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """Clients of a service with a trusted proxy, and two jobs that are over."""
    place = tmp_path_factory.mktemp("jobs")
    flags = ("--forwarded-allow-ips", PROXY, "--front-ends", "2", "--job-store", str(place))
    env = {"INFERPOOL_ADMIN_KEYS": ADMIN}
    with running("echo", *flags, env=env) as service, closing(Peers(service)) as peers:
        for id in ("other", "mine"):
            assert peers.ask(CLIENT, "PUT", f"/jobs/{id}").status_code == 202
            until(lambda id=id: service.get(f"/jobs/{id}?wait=60").json()["state"] == "succeeded")
        yield peers


def shown(answer: httpx.Response) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return all of an answer but what differs from call to call."""
    headers = [each for each in answer.headers.multi_items() if each[0] not in OF_A_CALL]
    return answer.status_code, headers, answer.content


def without_addresses(answer: httpx.Response, path: str) -> tuple[int, dict[str, str], object]:
    """Return an answer without the addresses in it that a proxy may change."""
    headers = {k: v for k, v in answer.headers.items() if k not in OF_A_CALL | OF_ADDRESSES}
    content: object = re.sub(rb'\n  <base href="[^"<>]*/">', b"", answer.content)
    if path == "/openapi.json":
        content = answer.json()
        assert isinstance(content, dict)
        content.pop("servers")
    return answer.status_code, headers, content


def test_the_log_and_shares_have_the_address_of_the_peer(peers):
    """Streams of events are shared by address: 48 of 64 places for one that asks alone."""
    spoofs = [("X-Forwarded-For", "10.9.9.9"), ("X-Inferpool-Client", "10.9.9.9 1")]
    for peer in (CLIENT, PROXY):
        peers.ask(peer, "POST", "/admin/resume", [*spoofs, ("X-API-Key", ADMIN)])
        assert peers.service.wait_for_log("admin: resume")["client"] == peer
    statuses: list[int] = []
    with httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        streams = []
        try:
            for number in range(65):
                headers = {"x-forwarded-for": f"10.0.0.{number}"}
                request = client.build_request(
                    "GET", f"{peers.service.url}/events/", headers=headers
                )
                streams.append(client.send(request, stream=True))
                statuses.append(streams[-1].status_code)
        finally:
            for stream in streams:
                stream.close()
    assert 429 in statuses
    assert set(statuses) == {200, 429}


@settings(max_examples=40)
@given(SPOOFS)
@example(ALL_THREE)
@example([("X-Inferpool-Client", f"{PROXY} 1"), *ALL_THREE])
def test_headers_of_those_who_are_not_trusted_change_nothing(peers, spoofs):
    for method, path in ASKS:
        plain = peers.plain(method, path)
        assert shown(peers.ask(CLIENT, method, path, spoofs)) == shown(plain), path


@settings(max_examples=40)
@given(SPOOFS)
@example(ALL_THREE)
@example([("X-Forwarded-Prefix", "/it's&<b>")])
def test_headers_of_a_trusted_proxy_change_addresses_and_nothing_else(peers, spoofs):
    for method, path in ASKS:
        plain = peers.plain(method, path)
        answer = peers.ask(PROXY, method, path, spoofs)
        assert without_addresses(answer, path) == without_addresses(plain, path)
        for name in ("location", "link"):
            assert (name in answer.headers) == (name in plain.headers)
        if location := answer.headers.get("location"):
            assert re.fullmatch(
                r"((https?://[A-Za-z0-9.:~_\[\]-]+)?(/[^/\"<>\\]+)*|\.\./\.\.)/jobs/mine", location
            )
            assert location.startswith("../../jobs") or ".." not in location.split("/")


def test_addresses_have_what_a_trusted_proxy_says(peers):
    def made(*headers: tuple[str, str]) -> str:
        return peers.ask(PROXY, "PUT", "/jobs/mine", list(headers)).headers["location"]

    proto, host, prefix = ALL_THREE
    assert made() == "../jobs/mine"
    assert made(prefix) == "/models/jobs/mine"
    assert made(proto, host) == "https://example.org/jobs/mine"
    assert made(*ALL_THREE) == "https://example.org/models/jobs/mine"
    assert made(proto) == f"https://{urlsplit(peers.service.url).netloc}/jobs/mine"
    assert made(host, ("X-Forwarded-Prefix", "/")) == "http://example.org/jobs/mine"
    assert made(("X-Forwarded-Host", "evil.example, example.org")).startswith("http://example.org/")
    assert made(*ALL_THREE, ("X-Forwarded-Prefix", "/a/../b")) == "https://example.org/jobs/mine"
    document = peers.ask(PROXY, "GET", "/openapi.json", ALL_THREE).json()
    assert document["servers"][0]["url"] == "https://example.org/models"


def test_only_one_slash_at_the_end_of_a_path_is_ignored(peers):
    for method, path in (("GET", "/health"), ("POST", "/predict"), ("POST", "/predict/echo")):
        statuses = [peers.ask(CLIENT, method, path + end).status_code for end in ("/", "//")]
        assert statuses == [200, 404], path


def look_around(root: str) -> None:
    """Go through a service as a browser and a client do that know one address of it, `root`/."""
    with httpx.Client(timeout=60, follow_redirects=False) as client:

        def get(url: str) -> httpx.Response:
            answer = client.get(url, headers=BROWSER)
            assert answer.status_code == 200, (url, answer.text)
            assert str(answer.url).startswith(f"{root}/"), url
            return answer

        for page in (f"{root}/", f"{root}/docs", f"{root}/docs/"):
            answer = get(page)
            base = re.search(r'<base href="([^"]+)">', answer.text)
            base_url = urljoin(page, base[1] if base else "")
            links = re.findall(r"""(?:href|src)="((?!#|data:)[^"]+)|url: '([^']+)""", answer.text)
            links = [link or other for link, other in links]
            assert len(links) > 3
            for link in {*links, *(["events"] if page == f"{root}/" else [])}:
                if link == "events":
                    with client.stream("GET", urljoin(base_url, link)) as feed:
                        assert feed.status_code == 200
                elif not base or link != base[1]:
                    get(urljoin(base_url, link))
        document = f"{root}/openapi.json"
        server = urljoin(document, get(document).json()["servers"][0]["url"]).rstrip("/")
        for path in ("/predict", "/predict/", "/predict/echo", "/predict/echo/"):
            answer = client.post(server + path, content=BODY, headers=TEXT)
            assert (answer.status_code, answer.json()) == (200, {"predictions": [1]}), path
        for path, later in (("/predict/echo", True), ("/predict/echo/", True), ("/jobs/", False)):
            headers = TEXT | ({"prefer": "respond-async"} if later else {})
            made = client.post(root + path, content=BODY, headers=headers)
            assert made.status_code == 202, made.text
            job = urljoin(str(made.url), made.headers["location"])
            assert get(f"{job}/?wait=60").json()["state"] == "succeeded"
            assert get(f"{job}/result/").json() == {"predictions": [1]}
        listed = get(f"{root}/jobs/?limit=1")
        (following,) = re.findall(r'<([^>]+)>; rel="next"', listed.headers["link"])
        assert get(urljoin(str(listed.url), following)).json()["jobs"]
        for path in ("/health/", "/health/live/", "/health/ready/", "/metrics/", "/predict/none/"):
            assert client.get(root + path).status_code == (405 if "none" in path else 200), path


@needs_nginx
def test_everything_works_under_a_path_of_nginx(peers, tmp_path: Path):
    """With the examples of the page, and behind a proxy that removes its path and says nothing."""
    told, left, _ = re.findall(r"```nginx\n(location .+?\n}\n)```", PAGE, re.DOTALL)
    port, other_port = free_port(), free_port()
    bare = told.replace("/models/ {", "/bare/ {")
    bare = "\n".join(line for line in bare.splitlines() if "X-Forwarded" not in line)
    told = told.replace("proxy_pass", f"proxy_bind {PROXY}; proxy_pass")
    text = (
        f"events {{}}\nhttp {{\naccess_log off; server {{ listen 127.0.0.1:{port};"
        f"location = /admin {{ return 404; }}\n{bare}\n{told}\n{left}}} }}"
    )
    text = text.replace("127.0.0.1:8001", urlsplit(peers.service.url).netloc)
    text = text.replace("127.0.0.1:8002", f"127.0.0.1:{other_port}")
    flags = ("--root-path", "/vision", "--job-store", str(tmp_path / "jobs"))
    with (
        nginx(tmp_path, text, f"http://127.0.0.1:{port}") as url,
        running("echo", *flags, port=other_port) as other,
    ):
        for root in (f"{url}/bare", f"{url}/models", f"{url}/vision"):
            look_around(root)
        assert other.get("/health/ready").status_code == 200
        assert other.get("/visions/health/ready").status_code == 404
        page = httpx.get(f"{url}/vision", headers=BROWSER)
        assert '<base href="/vision/">' in page.text
        assert "base-uri 'self'" in page.headers["content-security-policy"]
        for root in (f"{url}/bare", f"{url}/models/", f"{url}/vision"):
            with Client(root) as client:
                assert client.predict(7).value == 7
                assert [each.value for each in client.submit([1, 2])] == [1, 2]
        made: Any = httpx.put(f"{url}/models/jobs/x", content=BODY, headers=TEXT)
        assert made.headers["location"] == f"{url}/models/jobs/x"
