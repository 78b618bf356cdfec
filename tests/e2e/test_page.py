"""The page at `/` in a real browser, over a real service."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest

from inferpool.service.api.routes.health import ModelHealth
from tests.browser import chromium
from tests.e2e.running import FAULTY, ROOT, Running, running, until
from tests.page_states import (
    MODEL,
    Scenario,
    changing,
    scenarios,
    state,
    with_jobs,
    without_models,
    worker,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHOTO = ROOT / "models/vision/photos/chelsea.jpg"
KEY, ADMIN = "a-key-for-this-page", "a-key-for-operators"
SETTINGS = {
    "default_model": "efficientnet_lite0",
    "max_queue_length": 4,
    "models": {
        "efficientnet_lite0": {"replicas": 1},
        "faulty": {"source": FAULTY, "replicas": 1, "max_batch_size": 1},
    },
}
BADGES = dict.fromkeys(("busy", "split", "empty", "quarantine"), "Ready") | {
    name: name.capitalize()
    for name in ("starting", "degraded", "unavailable", "failed", "overloaded", "draining")
}
BADGES |= {
    "several": "Degraded",
    "changing": "Ready",
    "nothing": "No models",
    "hosts": "Ready",
    "no hosts": "No hosts",
}
"""The word that the page shows for each state."""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def service(browser: "Browser") -> Iterator[Running]:
    keys = {f"INFERPOOL_{kind}_KEYS": KEY for kind in ("PREDICT", "METRICS")}
    with running(settings=SETTINGS, env={**keys, "INFERPOOL_ADMIN_KEYS": ADMIN}) as service:
        yield service


@contextlib.contextmanager
def opened(
    browser: "Browser",
    url: str,
    *scripts: str,
    width: int = 1280,
    path: str = "/",
    charts: bool = False,
) -> Iterator["Page"]:
    """Open the page; it may log no errors, and load nothing from anywhere else.

    Without charts it lacks their library, which costs a browser more than the rest of the page.
    """
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(45_000)
    noise: list[str] = []
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("console", lambda message: noise.append(message.text))
    page.on("request", lambda each: each.url.startswith((url, "data:")) or noise.append(each.url))
    if not charts:
        page.route("**/plotly.min.js", lambda route: route.abort())
    for script in scripts:
        page.add_init_script(script)
    page.goto(url + path)
    yield page
    context.close()
    # The browser, not the page, logs an answer such as 401 or 500.
    assert [text for text in noise if not text.startswith("Failed to load resource")] == []


WITH_KEY = f'sessionStorage.setItem("inferpool.key.metrics", "{KEY}")'
WITH_OTHER_KEY = f'{WITH_KEY}; sessionStorage.setItem("inferpool.key.predict", "not-the-right-key")'


def live(browser: "Browser", service: Running, path: str = "/", *, charts: bool = False):
    """Open the page with a key."""
    return opened(browser, service.url, WITH_KEY, path=path, charts=charts)


def test_a_picture_is_predicted_and_its_time_shown(browser, service):
    with live(browser, service, charts=True) as page:
        page.wait_for_selector("#status[data-level=good]")
        page.set_input_files("#file", PHOTO)
        page.wait_for_selector(".labels li")
        assert "Egyptian cat" in page.text_content(".labels li:first-child")
        parts = page.eval_on_selector_all(".time-list li", "all => all.map(li => li.dataset.part)")
        assert parts == ["queue", "preprocess", "inference", "rest", "network"]
        page.wait_for_selector("#preview")
        page.wait_for_selector("#latency-chart:not([data-empty]) .main-svg")
        assert "Latency now: p50" in page.text_content("#latency-text")
        assert page.inner_text("#model-facts").startswith("source efficientnet_lite0")
        page.set_input_files("#file", {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": b"no"})
        page.wait_for_selector(".problem")
        page.wait_for_selector("#sizes-text:text('2 batches')", state="attached")
        assert page.inner_text("#figures :text('Batch size') + *") == "1"  # failed ones count too


@pytest.mark.slow
def test_without_a_key_it_asks_for_one_and_goes_on_with_it(browser, service):
    with opened(browser, service.url, path="/#a%link%that%was%cut%of%E0") as page:
        page.wait_for_selector("#key-form:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "key"
        for wrong in ("not-the-right-key-at-all", "\N{CYRILLIC SMALL LETTER EF} in no header"):
            page.fill("#key", wrong)
            page.keyboard.press("Enter")
            page.wait_for_selector("#key-text:text('not known')")
            # Not by `wait_for_function`, whose second look the page's policy forbids.
            until(lambda: not page.input_value("#key"))
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("body[data-link=live]")
        assert page.is_hidden("#key-form")
        assert page.is_hidden("#metrics")  # which a link, without the key, would not get
        assert page.evaluate("localStorage.length") == 0


@pytest.mark.slow
def test_an_input_that_kills_is_shown_with_its_code_and_the_restart_with_its_reason(
    browser, service
):
    with live(browser, service, path="/#faulty") as page:
        page.wait_for_selector("body[data-link=live]")
        assert '"n": 0' in page.input_value("#json")  # its example
        page.fill("#json", '{"instances": [{"n": 1, "do": "kill"}]}')
        page.press("#json", "Control+Enter")
        page.wait_for_selector(".problem")
        told = page.inner_text(".problem")
        assert "code worker_crashed" in told
        assert "request " in told
        page.wait_for_selector("#restarts [data-cause=signal]")
        assert "SIGKILL" in page.inner_text("#restarts")
        page.wait_for_selector("#workers-count:text('1 of 1 ready')")


@pytest.mark.slow
def test_each_instance_that_failed_is_shown_with_its_place_and_reason(browser, service):
    bad = '{"n": 1, "do": "raise"}'
    with live(browser, service, "/#faulty") as page:
        page.wait_for_selector("#status[data-level=good]")
        page.check("input[value=json]", force=True)

        def failures_of(instances: str, title: str) -> list[str]:
            page.fill("#json", f'{{"instances": [{instances}]}}')
            page.keyboard.press("Control+Enter")
            page.wait_for_selector(f".problem strong:text('{title}')")
            return page.locator(".problem .failures li").all_inner_texts()

        told = failures_of('{"n": 1}, 7' + 4 * f", {bad}", "5 of 6 instances failed")
        assert told[0] == 'instances[1] an instance is {"n": number, "do": act} invalid_input'
        assert '"twice": 2' in page.inner_text("#answer pre")
        rest = page.locator(".problem details li")
        assert [each.is_visible() for each in rest.all()] == [False, False]
        page.click("summary:text('and 2 more')")
        assert rest.last.inner_text().startswith("instances[5] ")
        assert len(failures_of(f"{bad}, {bad}", "The model failed on this input")) == 2


@pytest.mark.slow
def test_overload_and_draining_are_shown_while_they_last(browser, service):
    is_seen = threading.Event()

    def ask_on() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"instances": [{"n": 1, "do": "sleep"}]}
        with httpx.Client(base_url=service.url, headers=headers) as client:
            while not is_seen.is_set():
                if client.post("/predict/faulty", json=body).status_code == 429:
                    time.sleep(0.1)

    def drain(path: str) -> None:
        answer = httpx.post(service.url + path, headers={"Authorization": f"Bearer {ADMIN}"})
        assert answer.is_success

    with live(browser, service) as page:
        page.wait_for_selector("body[data-link=live]")
        with ThreadPoolExecutor(12) as pool:
            asking = [pool.submit(ask_on) for _ in range(12)]
            try:
                page.wait_for_selector("text=faulty is overloaded.")
                page.wait_for_selector("#notice:has-text('the queue is full')")
            finally:
                is_seen.set()
        assert [each.result() for each in asking] == [None] * 12
        drain("/admin/drain")
        page.wait_for_selector("text=Draining.")
        drain("/admin/resume")
        page.wait_for_selector("#status:not(:text('Draining'))")


@pytest.mark.slow
def test_every_state_has_its_word(browser, service):
    events = {
        name: msgspec.json.encode(scenario.events[0]).decode()
        for name, scenario in scenarios().items()
        if name in BADGES
    }
    judge = """async (events) => {
        const { situationOf } = await import("/page/situation.js");
        const judged = Object.entries(events).map(([name, text]) => {
            const { history, ...state } = JSON.parse(text);
            return [name, situationOf(state, history).badge];
        });
        return Object.fromEntries(judged);
    }"""
    with opened(browser, service.url) as page:
        assert page.evaluate(judge, events) == BADGES


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["busy", "several", "failed", "disconnected", "changing", "jobs", "hosts"]
)
def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser, service, name):
    script, charts = scenarios()[name].script(), name == "busy"
    with opened(browser, service.url, script, width=360, charts=charts) as page:
        page.wait_for_selector(".worker")
        if charts:
            page.wait_for_selector(".main-svg", state="attached")
        if name == "disconnected":
            page.wait_for_selector("body[data-link=lost]")
            assert page.is_visible("#reconnect")
        elif name == "failed":
            assert "/0, efficientnet_lite0/1: weights.pth" in page.inner_text("#notice")
            assert "SIGUSR2" in page.inner_text("#notice-text")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.slow
def test_no_example_is_invented_for_a_model_that_reads_a_form_of_its_own(browser, service):
    states = scenarios()
    with opened(browser, service.url, states["own form"].script()) as page:
        page.wait_for_selector("#try-hint:has-text('a form of its own')")
        assert '"instances": []' in page.input_value("#json")
    with opened(browser, service.url, states["shown"].script()) as page:
        page.wait_for_selector("#try-json:visible")
        assert json.loads(page.input_value("#json")) == {"instances": [{"words": ["a"]}]}
        assert page.is_hidden("#try-hint")


@pytest.mark.slow
def test_versions_are_shown_with_their_figures_and_the_change_that_goes_on(browser, service):
    with opened(browser, service.url, scenarios()["changing"].script()) as page:
        page.wait_for_selector("#versions .worker")
        assert "version 3 starting: loading weights" in page.inner_text("#change")
        refused = page.inner_text("#versions .worker:nth-child(2)")
        for told in ("Version 2", "min_agreement is 99.00%", "71.00 % agree", "9.5 ms"):
            assert told in refused
        assert "Version 2: refused, its answer" in page.inner_text("#steps")
        assert "efficientnet_lite0/3/0" in page.inner_text("#workers")
        assert page.inner_text("#workers-count") == "2 of 2 ready"
        assert page.inner_text("#status") == "Ready"
        page.click("#models a:has-text('new')")  # which loads for the first time
        page.wait_for_selector("#figures :text('no version serves')")
        assert page.inner_text("#change") == "add"


def test_several_models_have_an_overview_all_restarts_and_a_banner_that_names_its_model(
    browser, service
):
    with opened(browser, service.url, scenarios()["several"].script()) as page:
        page.wait_for_selector("#models .worker")
        cards = {
            each.inner_text().partition("\n")[0]: each for each in page.locator("#models a").all()
        }
        assert [*cards] == ["efficientnet_lite0", "faulty", "far", "minilm_l6"]
        badges = [each.locator(".badge").inner_text() for each in cards.values()]
        assert badges == ["ready", "degraded", "failed", "ready"]
        assert "workers 1 of 2" in cards["faulty"].inner_text()
        assert "restarts 1" in cards["faulty"].inner_text()
        assert "far cannot be served." in page.inner_text("#notice")
        restarts = page.locator("#restarts li").all_inner_texts()
        assert [text.split(",")[0].split("\n")[-1] for text in restarts] == [
            "faulty/1",
            "efficientnet_lite0/0",
        ]
        cards["faulty"].click()
        assert page.evaluate("location.hash") == "#faulty"
        assert page.inner_text("#model-name") == "faulty"
        assert "faulty/1" in page.inner_text("#workers")
        assert page.get_attribute("#models [data-key=faulty] a", "aria-current") == "true"
        assert "faulty/1" in page.inner_text("#restarts"), "and everybody else's"
        assert "efficientnet_lite0/0" in page.inner_text("#restarts")


@pytest.mark.slow
def test_a_card_that_is_made_anew_keeps_the_focus(browser, service):
    focused = """async () => {
        const { h, keep } = await import("/page/dom.js");
        const list = document.body.appendChild(h("ul"));
        const make = ({ name, rate }) =>
            h("li", {}, h("a", { href: "#" }, name), h("button", {}, `${name} ${rate}`));
        const show = (items) => {
            keep(list, items, (item) => item.name, make);
            return document.activeElement.textContent;
        };
        show([{ name: "a", rate: 1 }, { name: "b", rate: 1 }]);
        list.querySelectorAll("button")[1].focus();
        return [
            show([{ name: "a", rate: 2 }, { name: "b", rate: 2 }]),
            show([{ name: "b", rate: 3 }, { name: "a", rate: 2 }]),
            show([{ name: "a", rate: 3 }]) === document.body.textContent,
        ];
    }"""
    with opened(browser, service.url, scenarios()["several"].script()) as page:
        page.wait_for_selector("#models .worker")
        assert page.evaluate(focused) == ["b 2", "b 3", True]


def test_a_sample_picture_is_sent_by_one_click(browser, service):
    with live(browser, service) as page:
        page.wait_for_selector("body[data-link=live]")
        page.click("#sample")
        page.wait_for_selector(".labels li")
        assert "cat" in page.text_content(".labels li:first-child")
        page.click("#models a:has-text('faulty')")
        page.wait_for_selector("#model-name:text('faulty')")
        assert page.is_hidden("#sample")


def test_what_was_found_is_drawn_over_the_picture(browser, service):
    """The sample has 451 x 300 pixels; one of its colours hardly looks like any of these."""
    show = """async (prediction) => {
        const { showAnswer } = await import("/page/result.js");
        const picture = await (await fetch("/page/sample.jpg")).blob();
        const place = document.getElementById("answer");
        showAnswer(place, { predictions: [prediction] }, new Headers(), 1, picture);
    }"""
    look = """([x, y]) => {
        const canvas = document.querySelector("canvas.found");
        const [column, row] = [canvas.width * x, canvas.height * y].map(Math.floor);
        return [...canvas.getContext("2d").getImageData(column, row, 1, 1).data];
    }"""
    right = {"size": [300, 451], "counts": [300 * 300, 300 * 151]}
    person = {"nose": [100.0, 200.0, 9.0], "left_eye": [120.0, 200.0, 9.0]}
    boxes = {"boxes": [[20, 30, 400, 290]], "labels": ["cat"], "scores": [0.9]}
    with live(browser, service) as page:
        page.wait_for_selector("body[data-link=live]")

        def looks(prediction: object, *place: float) -> list[int]:
            page.evaluate(show, prediction)
            page.wait_for_selector("canvas.found:not([hidden])")
            found: list[int] = page.evaluate(look, place)
            return found

        plain = looks(boxes, 0.5, 0.5)
        assert looks(boxes, 20 / 451, 0.5) == [15, 88, 189, 255]
        assert "cat90.0 %" in page.inner_text(".labels li").replace("\n", "")
        assert "with cat 90.0 %" in str(page.get_attribute("canvas.found", "aria-label"))
        assert looks({**boxes, "keypoints": [person]}, 110 / 451, 200 / 300) == [15, 88, 189, 255]
        masked = {**boxes, "masks": [right]}
        assert looks(masked, 0.5, 0.5) == plain
        assert looks(masked, 0.8, 0.5) != looks(boxes, 0.8, 0.5)
        assert looks(masked, 0.8, 0.5) == looks({"sofa": right}, 0.8, 0.5)
        assert page.inner_text(".labels li").replace("\n", "") == "sofa33.5 %"
        page.evaluate(show, {"boxes": [], "labels": [], "scores": []})
        page.wait_for_selector("#answer:has-text('Nothing was found')")


@pytest.mark.slow
def test_a_banner_names_its_model_if_there_are_others(browser, service):
    titles = """async (events) => {
        const { situationOf } = await import("/page/situation.js");
        return events.map((text) => {
            const { history, ...state } = JSON.parse(text);
            return situationOf(state, history).title;
        });
    }"""
    other = ModelHealth(name="b", ready=True, workers=[worker(model="b")])
    down = worker(model="a", state="backoff", restarts=1, reason="exit code 3")
    begins = worker(model="a", state="starting", reason="loading")
    found = []
    for status, own, others in (
        ("degraded", [worker(), down], [other]),
        ("degraded", [worker(), down], []),
        ("starting", [begins], [other]),
        ("unavailable", [down], [other]),
    ):
        found.append(state(own, status=status, others=others))
    found.append(replace(state(others=[other], quarantined=2)))
    events = [msgspec.json.encode(each).decode() for each in found]
    with opened(browser, service.url) as page:
        assert page.evaluate(titles, events) == [
            f"{MODEL}: 1 worker of 2 not ready.",
            "1 worker of 2 not ready.",
            f"{MODEL}: starting.",
            f"{MODEL}: requests are turned away.",
            f"{MODEL}: 2 inputs in quarantine.",
        ]


@pytest.mark.slow
def test_hosts_are_shown_with_their_workers_and_gpus_and_those_that_were_lost(browser, service):
    with opened(browser, service.url, scenarios()["hosts"].script()) as page:
        page.wait_for_selector("#hosts .worker")
        assert "1 of 2 silent" in page.inner_text("#hosts-count")
        near, far, lost = (each.inner_text() for each in page.query_selector_all("#hosts > li"))
        assert all(text in near for text in ("gpu-0", "round trip 0.40 ms", "1 of 1 worker"))
        assert all(text in near for text in ("31.0 MiB of 256 MiB shared", "GPU 0", "70 % busy"))
        assert "Its clock is 3.0 s behind." in far
        assert "no sign of life for 3 s" in lost
        assert "gpu-0 cuda:0" in page.inner_text("#workers")
        assert "gpu-9: no sign of life" in page.inner_text("#notice")
    with opened(browser, service.url, scenarios()["no hosts"].script()) as page:
        page.wait_for_selector("text=none has joined at 0.0.0.0:7000")
        assert "no host is connected" in page.inner_text("#figures")


@pytest.mark.slow
def test_jobs_are_shown_as_they_go_on_and_can_be_cancelled_and_saved(browser, service):
    headers = {"Authorization": f"Bearer {KEY}"}

    def begin(id: str, *instances: object) -> None:
        path = f"{service.url}/jobs/{id}?model=faulty"
        answer = httpx.put(path, json={"instances": instances}, headers=headers)
        assert answer.status_code == 202, answer.text

    begin("short", {"n": 1}, {"n": 2, "do": "raise"})
    with live(browser, service) as page:
        short, long = (f"#jobs [data-key={id}]" for id in ("short", "long"))
        page.wait_for_selector(f"{short} .badge:text('succeeded')")
        assert page.inner_text(f"{short} .progress").startswith("2 of 2 instances")
        assert page.inner_text(f"{short} .progress").endswith("1 failed")
        with page.expect_download() as saved:
            page.click(f"{short} :text('Result')")
        predictions = json.loads(saved.value.path().read_text())["predictions"]
        assert [each.get("twice") for each in predictions] == [2, None]
        begin("long", *100 * [{"n": 1, "do": "sleep"}])
        page.click(f"{long} :text('Cancel')")
        page.wait_for_selector(f"{long} .badge:text('cancelled')")
        page.wait_for_selector("#jobs-facts:has-text('cancelled 1')")
        assert page.is_hidden(f"{long} button")
    with opened(browser, service.url, WITH_OTHER_KEY) as page:
        page.fill("#jobs-problem input", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector(short)


@pytest.mark.slow
def test_jobs_of_a_store_that_does_not_open_are_not_asked_for(browser, service):
    closed = replace(state(), jobs=replace(with_jobs(state())[0].jobs, open=False))
    with opened(browser, service.url, Scenario(events=[closed]).script()) as page:
        page.wait_for_selector("#jobs-count:text('their store is not open')")
        assert page.locator("#jobs li").count() == 0
    with opened(browser, service.url, scenarios()["busy"].script()) as page:
        page.wait_for_selector(".worker")
        assert page.is_hidden("#jobs-part")


@pytest.mark.slow
def test_models_go_and_come_while_the_page_is_open(browser, service):
    gone = without_models(changing())
    script = Scenario(events=[changing(), gone]).script()
    with opened(browser, service.url, script) as page:
        page.wait_for_selector("#status:text('No models')")
        assert page.is_hidden("#figures")
        assert page.is_hidden("#send")
    script = Scenario(events=[gone, state()]).script()
    with opened(browser, service.url, script, charts=True) as page:
        page.wait_for_selector("#status:text('Ready')")
        page.wait_for_selector("#latency-plot .main-svg", state="attached")
        assert page.inner_text("#model-name") == "efficientnet_lite0"
        assert page.is_hidden("#versions-part")


@pytest.mark.slow
def test_no_label_of_a_chart_is_cut_off(browser, service):
    inside = """([...document.querySelectorAll(".plot")].every((plot) =>
        [...plot.querySelectorAll(".ytick text")].every((label) =>
            label.getBoundingClientRect().left >= plot.getBoundingClientRect().left)))"""
    for name in ("busy", "slow"):
        with opened(browser, service.url, scenarios()[name].script(), charts=True) as page:
            page.wait_for_selector("#latency-plot .ytick text")
            until(lambda: page.evaluate(inside))


@pytest.mark.slow
def test_the_keyboard_reaches_everything_in_order(browser, service):
    script = scenarios()["busy"].script()
    with opened(browser, service.url, script) as page:
        page.wait_for_selector(".worker")
        reached = []
        for _ in range(7):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("document.activeElement.id || document.activeElement.innerText")
            )
            if reached[-1] == "theme":
                page.keyboard.press("Enter")
                page.keyboard.press("Enter")
        assert reached[0].startswith("Skip")
        assert reached[1:4] == ["API docs", "metrics", "theme"]
        assert [each.partition("\n")[0] for each in reached[4:6]] == [
            "efficientnet_lite0",
            "minilm_l6",
        ]
        assert reached[6:] == ["file"]
        outline = "getComputedStyle(document.getElementById('drop')).outlineStyle"
        assert page.evaluate(outline) == "solid"
        assert page.get_attribute("html", "data-theme") == "dark"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
        page.reload()
        assert page.get_attribute("html", "data-theme") == "dark"


@pytest.mark.slow
@pytest.mark.measures
def test_an_open_page_does_not_delay_the_end_and_shows_that_the_service_stopped(browser, service):
    with live(browser, service) as page:
        page.wait_for_selector("body[data-link=live]")
        began = time.monotonic()
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
        assert time.monotonic() - began < 15  # a call that is not over holds it up for longer
        page.wait_for_selector("#status:text('Stopped')")
        assert page.is_visible("#reconnect")
