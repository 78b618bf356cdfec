import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferpool.service.api.auth import POLICIES
from inferpool.service.settings.loader import load
from inferpool.service.settings.names import SettingsError
from inferpool.service.settings.paths import OF_PROTOCOLS
from inferpool.service.settings.trust import OWN_PATHS, TrustedPeers, authority_of, prefix_of


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        *(("", ""), ("/", ""), ("/models", "/models"), ("/models/", "/models")),
        *(("/a/b-c_d.e~f", "/a/b-c_d.e~f"), ("/caf%C3%A9/x", "/caf%C3%A9/x"), ("/...", "/...")),
        *((f"/{'x' * 1023}", f"/{'x' * 1023}"), (f"/{'x' * 1024}", None)),
        *((each, None) for each in ("models", "//", "//evil.example", "/a//b", "/a//", "/\\evil")),
        *((each, None) for each in ("/..", "/a/../b", "/a/./b", "/%2e%2e/b", "/a%2F..%2Fb", "/%")),
        *((each, None) for each in ("/a b", "/a?b", "/a#b", '/a"', "/<b>", "/é", "/%0d%0aX: y")),
        *(
            (each, None)
            for each in ("/%00", "/%5c%5Cevil", "/a\tb", "/a\r\nb", "/a\n", "http://h/a")
        ),
    ],
)
def test_a_prefix_is_a_path_that_stays_on_its_host(text: str, prefix: str | None):
    assert prefix_of(text) == prefix


@pytest.mark.parametrize(
    "text",
    [
        *("h", "example.org", "example.org:8443", "10.0.0.5:80", "[::1]", "[fd00::1]:65535"),
        *("xn--caf-dma.example", "a_b.svc.cluster.local"),
    ],
)
def test_a_host_is_an_authority(text: str):
    assert authority_of(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "a b", "h:", "h:99999", "h:+1", "h:1:2", "user@h", "u:p@h", "h/a", "h?a", "h#a"),
        *(
            "::1",
            "[::1",
            "[zz]",
            "[1.2.3.4]",
            "[::1]x",
            "h\n",
            "h\r\nX: y",
            "h,i",
            "é",
            "<h>",
            "h٣",
        ),
        *("x" * 256, "http://h"),
    ],
)
def test_anything_else_is_no_authority(text: str):
    assert authority_of(text) is None


@given(st.text(max_size=40))
def test_what_is_accepted_has_only_characters_that_no_page_or_header_could_take_for_more(text: str):
    for found in (prefix_of(text), authority_of(text)):
        assert found is None or (found.isascii() and not set(found) & set(' "<>\\?#\r\n\t'))


@pytest.mark.parametrize(
    ("texts", "inside", "outside"),
    [
        ([], [], ["127.0.0.1", "::1", "10.0.0.5", None, ""]),
        (["*"], ["127.0.0.1", "::1", "nowhere", None], []),
        (
            ["10.0.0.5"],
            ["10.0.0.5", "::ffff:10.0.0.5"],
            ["10.0.0.50", "127.0.0.1", None, "10.0.0.5 x"],
        ),
        (
            ["10.0.0.0/8", "fd00::/8"],
            ["10.9.9.9", "fd12::1", "fd12::1%eth0"],
            ["11.0.0.1", "fe80::1"],
        ),
    ],
)
def test_only_peers_that_were_named_are_trusted(
    texts: list[str], inside: list[str | None], outside: list[str | None]
):
    peers = TrustedPeers(texts)
    assert [host in peers for host in inside] == [True] * len(inside)
    assert [host in peers for host in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ROOT_PATH", "models", "not the beginning of a path"),
        ("ROOT_PATH", "/a/../b", "not the beginning of a path"),
        ("ROOT_PATH", "/predict/v1", "a path of the service itself"),
        ("FORWARDED_ALLOW_IPS", "proxy.example", "neither an address nor a network"),
        ("FORWARDED_ALLOW_IPS", "10.0.0.5, 10.0.0.1/8", "10.0.0.1/8"),
        ("FORWARDED_ALLOW_IPS", "unix:", "neither an address nor a network"),
    ],
)
def test_settings_that_could_not_work_are_refused_with_a_sentence(name, value, said, tmp_path):
    with pytest.raises(SettingsError, match=said):
        load({}, {f"INFERPOOL_{name}": value}, tmp_path)


def test_nobody_is_trusted_unless_a_setting_says_so(tmp_path):
    settings = load({}, {"FORWARDED_ALLOW_IPS": "*"}, tmp_path).settings  # uvicorn's variable
    assert (settings.root_path, settings.forwarded_allow_ips) == ("", ())
    variables = {
        "INFERPOOL_ROOT_PATH": "/m/",
        "INFERPOOL_FORWARDED_ALLOW_IPS": "10.0.0.5, fd00::/8",
    }
    settings = load({}, variables, tmp_path).settings
    assert (settings.root_path, settings.forwarded_allow_ips) == ("/m", ("10.0.0.5", "fd00::/8"))


def test_no_root_path_can_hide_a_path_of_the_service():
    theirs = OF_PROTOCOLS  # a proxy may well serve this service below /models
    assert {path[1:].partition("/")[0] for path in POLICIES} - {""} - theirs == OWN_PATHS
