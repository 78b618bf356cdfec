import re

import pytest

from inferpool.service.api.cors import Cors
from inferpool.service.api.web import App
from inferpool.service.parts.live.alive import alive_router
from inferpool.service.parts.live.page import Page
from tests.service.api.fakes import call


@pytest.fixture(scope="module")
def app() -> App:
    return App(version="0", routers=[Page(docs=True).router()])


def test_the_page_asks_for_files_that_are_there_and_for_nothing_elsewhere(app: App) -> None:
    page = call(app, "GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'; style-src 'self'" in page.headers["content-security-policy"]
    files = set(re.findall(r'(?:href|src)="(page/[^"]+)"', page.text))
    files.add("page/plotly.min.js")
    assert len(files) > 5
    seen = set()
    while files:
        file = files.pop()
        seen.add(file)
        answer = call(app, "GET", f"/{file}")
        assert answer.status_code == 200, file
        if "plotly.min" in file:
            continue
        assert not re.search(r"(?:src|href|url|import|fetch)\W{1,3}(?:https?:)?//", answer.text), (
            file
        )
        imports = re.findall(r'^import .* from "\./([^"]+)";$', answer.text, re.MULTILINE)
        files |= {f"page/{name}" for name in imports} - seen
    assert not re.search(r'<script>|style="|\son\w+="', page.text)  # our policy forbids these


def test_caches_are_told_of_all_that_an_answer_depends_on() -> None:
    app = App(
        version="0",
        routers=[Page(docs=True).router()],
        cors=Cors(["https://app.example"]),
    )
    answer = call(app, "GET", "/page/main.js", headers={"origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert set(answer.headers.get_list("vary")) == {"accept-encoding", "Origin"}


def test_files_are_compressed_for_those_who_read_gzip_and_sent_once(app: App) -> None:
    first = call(app, "GET", "/page/main.js")
    assert first.headers["content-encoding"] == "gzip"
    assert first.headers["cache-control"] == "no-cache"
    again = call(app, "GET", "/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = call(app, "GET", "/page/main.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text == first.text
    assert call(app, "HEAD", "/page/main.js").headers["content-length"]


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/..%2Fapi%2Fpage.py"])
def test_nothing_else_is_there(app: App, path: str) -> None:
    assert call(app, "GET", path).status_code == 404


def test_the_page_and_its_link_to_the_documentation_can_be_left_out(app: App) -> None:
    assert 'href="docs"' in call(app, "GET", "/").text
    alone = App(version="0", docs=False, routers=[Page(docs=False).router()])
    assert 'href="docs"' not in call(alone, "GET", "/").text
    assert call(App(version="0"), "GET", "/").status_code == 404


def test_programs_learn_that_the_server_is_alive_where_browsers_see_the_page() -> None:
    app = App(version="0", routers=[alive_router(), Page(docs=True).router()])
    for headers in ({}, {"accept": "application/json"}):
        answer = call(app, "GET", "/", headers=headers)
        assert (answer.json(), answer.headers["vary"]) == ({"status": "alive"}, "accept")
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    assert "<title>" in call(app, "GET", "/", headers=browser).text
    assert call(app, "HEAD", "/").status_code == 200
