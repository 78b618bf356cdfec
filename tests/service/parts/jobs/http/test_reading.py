"""Bodies of jobs become instances, each error in its own place, or are refused whole."""

import base64
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferpool.service.api.codecs.body import BodyContext
from inferpool.service.api.codecs.requests import decode
from inferpool.service.batch.sources import open_source
from inferpool.service.errors import (
    BadRequestError,
    InvalidInputError,
    ServiceError,
    TooLargeError,
    UnsupportedTypeError,
)
from inferpool.service.parts.jobs.http import reading
from inferpool.service.parts.jobs.http.reading import JobBody, read_body
from inferpool.service.parts.jobs.records import StoredInstance
from tests.fuzz.mutate import mutate
from tests.service.api.codecs.test_json import JPEG
from tests.service.api.codecs.test_tensors import npy
from tests.service.api.fakes import body_of, head, spec
from tests.service.parts.jobs.http.test_archive import (
    archive_of,
    member,
    with_checksum,
    with_members,
)

JSONL, TAR = b"application/jsonl", b"application/x-tar"
FORM = b"multipart/form-data; boundary=b"
TWO = [spec(-1, 2, name="a"), spec(-1, name="b")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "body"


def begin(
    content_type: bytes, body: bytes, path: Path, asked: BodyContext | None = None
) -> JobBody:
    path.write_bytes(body)
    return read_body(content_type, path, asked or head())


def read(
    content_type: bytes, body: bytes, path: Path, asked: BodyContext | None = None
) -> list[StoredInstance]:
    return list(begin(content_type, body, path, asked).instances())


def problems(found: list[StoredInstance]) -> list[str | None]:
    return [each.problem and f"{each.problem.code} {each.problem.message}" for each in found]


def part(content: bytes, name: str = "f", filename: str | None = "f", type: str = "") -> bytes:
    """Return a part of a form with the boundary b."""
    said = f'form-data; name="{name}"' + ("" if filename is None else f'; filename="{filename}"')
    kind = f"Content-Type: {type}\r\n" if type else ""
    return f"--b\r\nContent-Disposition: {said}\r\n{kind}\r\n".encode() + content + b"\r\n"


# Lines of JSON


@settings(max_examples=60)
@given(
    lines=st.lists(
        st.one_of(
            st.recursive(
                st.none() | st.integers() | st.text(max_size=9),
                lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values),
                max_leaves=5,
            ).map(lambda value: json.dumps(value, ensure_ascii=False).encode()),
            st.binary(max_size=40).map(lambda line: line.replace(b"\n", b" ")),
        ),
        max_size=40,
    ),
    last=st.sampled_from((b"1", b"{", b"\xff")),
    end=st.sampled_from((b"", b"\n", b"\r\n", b"\n \n\t\n", b"\n\n  ")),
)
def test_each_line_is_one_instance_in_its_place(
    lines: list[bytes], last: bytes, end: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = [*lines, last]
    lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
    found = read(JSONL, b"\n".join(lines) + end, tmp_path_factory.getbasetemp() / "body")
    numbered = [each for each in enumerate(lines, 1) if each[1].strip(b" \t\r\n")]
    for (number, line), instance in zip(numbered, found, strict=True):
        if instance.problem is not None:
            assert instance.kind is None
            assert instance.problem.message.startswith(f"line {number}: ")
            with pytest.raises(ServiceError):
                decode(b"application/json", [b'{"instances":[%s]}' % line], head(max_instances=1))
        elif instance.kind == "json":
            assert instance.payload == line.strip(b" \t\r\n")


def test_every_name_of_lines_is_known(path: Path) -> None:
    for name in (*reading.LINES_TYPES, "Application/JSONL; charset=utf-8"):
        assert len(read(name.encode(), b"1\n2\n3", path)) == 3


def test_lines_are_read_as_the_elements_of_instances(path: Path) -> None:
    lines = [
        b'{"b64": "%s"}' % base64.b64encode(JPEG),
        b' {"b64": "eA=="}\r',
        b'{"b64": "eA==", "more": 1}',
        b'"text"',
        "[1, \u00fc]".encode().replace(b"\xc3\xbc", b'"\xc3\xbc"'),
    ]
    found = read(JSONL, b"\xef\xbb\xbf" + b"\n".join(lines), path)
    assert [(each.kind, each.payload) for each in found] == [
        ("image", JPEG),
        ("bytes", b"x"),
        *(("json", line) for line in lines[2:]),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "bad_request line 2: malformed JSON: it ends too early, after 1 bytes"),
        (b"1 2", "bad_request line 2: malformed JSON: trailing characters (byte 3)"),
        (b"\xef\xbb\xbf1", "bad_request line 2: malformed JSON: invalid character (byte 0)"),
        (b'"\xff"', "bad_request line 2: not UTF-8"),
        (b"[" * 101, "invalid_input line 2: nested more than 100 deep"),
        (b"[" * 60_000, "invalid_input line 2: nested more than 100 deep"),
        (b'{"b64": "?"}', "invalid_input line 2: b64: not base64 in a string"),
        (
            b'{"b64": "\\ud800"}',
            "bad_request line 2: malformed JSON: half of a surrogate pair (byte 9)",
        ),
        (
            b"1" * 600_001,
            "too_large line 2: is larger than the limit for an instance, 600000 bytes (the setting "
            "max_body_bytes)",
        ),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_that_is_no_instance_is_an_error_in_its_own_place(
    line: bytes, problem: str, end: bytes, path: Path
) -> None:
    body = end.join([b"1", line, b"3"])
    found = read(JSONL, body, path, head(max_body_bytes=600_000))
    assert [each.payload for each in found] == [b"1", b"", b"3"]
    before, shown, after = problems(found)
    assert shown is not None
    assert shown.startswith(problem)
    assert before is after is None


def test_a_line_may_be_as_long_as_the_limit(path: Path) -> None:
    for end in (b"", b"\n", b"\n2"):
        found = read(JSONL, b"1" * 50 + end, path, head(max_body_bytes=50))
        assert found[0].payload == b"1" * 50
        assert problems(read(JSONL, b"1" * 51 + end, path, head(max_body_bytes=50)))[0]


def test_empty_lines_are_left_out_as_by_batch(path: Path) -> None:
    body = b"\xef\xbb\xbf\n\n1\n \t\n{\n\r\n2\n\n\n"
    assert [each and each[:27] for each in problems(read(JSONL, body, path))] == [
        None, "bad_request line 5: malform", None
    ]  # fmt: skip
    lines = path.with_suffix(".jsonl")
    lines.write_bytes(body)
    source = open_source(str(lines))
    found = [source.read(index) for index in range(len(source))]
    assert [(each.data, bool(each.error)) for each in found] == [
        (b"1", False), (b"", True), (b"2", False)
    ]  # fmt: skip


# Archives


def test_files_of_an_archive_are_instances_by_their_names(path: Path) -> None:
    array = npy(np.ones((1, 2), np.float32))
    files = [
        ("x/1.JPG", b"not looked at"),
        ("x/2.json", b' {"a": [1]} '),
        ("x/3.json", b'{"b64": "%s"}' % base64.b64encode(JPEG)),
        ("x/4.txt", " A \u00fc\n".encode()),
        ("x/5.npy", array),
        ("6", JPEG),
        ("7.bin", b"opaque"),
    ]
    found = read(TAR, archive_of(*files), path, head(inputs=[spec(-1, 2)]))
    assert [each.kind for each in found] == [
        *("image", "json", "image", "json", "tensors", "image", "bytes"),
    ]
    payloads = [each.payload for each in found]
    assert payloads[:2] == [b"not looked at", b'{"a": [1]}']
    assert json.loads(payloads[3]) == "A \u00fc"
    assert found[4].headers[0].shape == (2,)
    assert payloads[4] == array[-8:]
    assert payloads[5:] == [JPEG, b"opaque"]


def test_the_labels_of_webdataset_are_no_instances(path: Path) -> None:
    files = [
        ("1.jpg", JPEG),
        ("1.cls", b"7"),
        ("x/2.label", b"8"),
        ("x/2.jpg", JPEG),
        ("cls", b"x"),
    ]
    found = read(TAR, archive_of(*files), path)
    assert [each.kind for each in found] == ["image", "image", "bytes"]


def test_a_file_that_is_no_instance_is_an_error_in_its_own_place(path: Path) -> None:
    batch = npy(np.ones((3, 2), np.float32))
    files = [
        ("0.jpg", b""),
        ("1.json", b"{"),
        ("2.txt", b"\xff"),
        ("3.txt", b" \n"),
        ("4.npy", b"x"),
        ("5.npy", batch),
        ("6.bin", b"x" * 1001),
        ("7.json", b""),
        ("8.jpg", JPEG),
    ]
    found = read(TAR, archive_of(*files), path, head(inputs=[spec(-1, 2)], max_body_bytes=1000))
    assert problems(found) == [
        "invalid_input file 0 ('0.jpg'): is empty",
        "bad_request file 1 ('1.json'): malformed JSON: it ends too early, after 1 bytes",
        "bad_request file 2 ('2.txt'): byte 0 is not UTF-8",
        "invalid_input file 3 ('3.txt'): is empty",
        "bad_request file 4 ('4.npy'): not an npy file (numpy.save makes one)",
        "invalid_input file 5 ('5.npy'): holds 3 instances; here each file must be one",
        "too_large file 6 ('6.bin'): has 1001 bytes; the limit for an instance is 1000 (the "
        "setting max_body_bytes)",
        "invalid_input file 7 ('7.json'): is empty",
        None,
    ]
    (link,) = problems(read(TAR, with_members(member("a", b"2", linkname="b")), path))
    assert link is not None
    assert link.startswith("invalid_input file 0 ('a'): is a link; ")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        *((JSONL, body) for body in (b"", b"\n\n", b"\xef\xbb\xbf", b"  \r\n ")),
        (TAR, archive_of()),
        (TAR, archive_of(("a.cls", b"1"))),
        (TAR, with_members(member("folder", b"5"))),
    ],
)
def test_a_body_without_instances_is_refused(content_type: bytes, body: bytes, path: Path) -> None:
    with pytest.raises(InvalidInputError, match="the body has no instances"):
        read(content_type, body, path)


# Forms


def test_a_form_gives_what_predict_reads_from_it(path: Path) -> None:
    files = [
        ("file", ("a.jpg", JPEG, "image/jpeg")),
        ("x", ("b.npy", npy(np.ones((3, 2), np.float32)), "application/octet-stream")),
        ("y", ("c", b"opaque" * 50, "application/octet-stream")),
        ("z", ("d", JPEG, "application/octet-stream")),
    ]
    made = httpx.Request("POST", "http://host", files=files, data={"top_k": "3"})
    content_type, asked = made.headers["content-type"].encode(), head(inputs=[spec(-1, 2)])
    expected = decode(content_type, [made.read()], asked)
    body = begin(content_type, made.read(), path, asked)
    assert body.parameters == expected.parameters == b'{"top_k":3}'
    assert [(each.kind, each.payload, each.headers) for each in body.instances()] == [
        (each.kind, body_of(each), each.headers) for each in expected.payloads
    ]


def test_fields_are_parameters_of_all_files_wherever_they_are(path: Path) -> None:
    form = [
        part(b"3", "top_k", None),
        part(b"x"),
        part(b'{"a": 1}', "parameters", None),
        part(b"y"),
        part(b"cat", "name", None),
    ]
    body = begin(FORM, b"".join(form) + b"--b--", path, head(b"labels=false&top_k=5"))
    assert json.loads(body.parameters) == {"top_k": 3, "a": 1, "name": "cat", "labels": False}
    assert [each.payload for each in body.instances()] == [b"x", b"y"]


def test_a_file_that_cannot_be_used_is_an_error_in_its_own_place(path: Path) -> None:
    form = [
        part(b"", filename="0"),
        part(b"x", filename="1", type="text/html"),
        part(npy(np.ones((2, 2), np.float32)), filename="2"),
        part(b"x", filename="4", type="application/npy"),
        part(b"x" * 1001, filename="5"),
        part(npy(np.ones((1, 1, 1), np.float32)), filename="6"),
        part(JPEG, filename="7"),
    ]
    asked = head(inputs=[spec(-1, 2)], max_body_bytes=1000)
    found = problems(read(FORM, b"".join(form) + b"--b--", path, asked))
    expected = [
        "invalid_input file 0 ('0'): is empty",
        "unsupported_type file 1 ('1'): 'text/html' is not supported in a form",
        None,
        None,
        "bad_request file 4 ('4'): not an npy file (numpy.save makes one)",
        "too_large file 5 ('5'): is larger than the limit for an instance, 1000 bytes (the ",
        "invalid_input file 6 ('6'): tensor 'x': expected shape [2] for one instance",
        None,
    ]
    assert len(found) == len(expected)
    for shown, start in zip(found, expected, strict=True):
        assert shown == start or (shown and start and shown.startswith(start))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (part(b"x"), BadRequestError, "the form: Unexpected end"),
        (part(b"x") + b"--b", BadRequestError, "the form: Unexpected end"),
        (b"", BadRequestError, "the form: Unexpected end"),
        (b"no boundary", BadRequestError, "the form: Boundary not found"),
        (b"--b--", InvalidInputError, "the form holds no file"),
        (part(b"x", "a", None) + b"--b--", InvalidInputError, "the form holds no file"),
        (
            part(b"x") + part(b"1" * 16_385, "a", None) + b"--b--",
            TooLargeError,
            "field 'a': more than 16384 bytes",
        ),
        (
            b"".join(part(b"1", f"a{number}", None) for number in range(65)) + b"--b--",
            TooLargeError,
            "the form has more than 64 fields",
        ),
        (part(b"x") + part(b"{", "parameters", None) + b"--b--", BadRequestError, "parameters: "),
        (part(b"x") + b"--b--" + b"y" * 2**20, BadRequestError, "Unexpected data after end"),
    ],
)
def test_a_broken_form_is_refused_before_its_instances_are_read(
    body: bytes, error: type[ServiceError], message: str, path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        begin(FORM, body, path)


@pytest.mark.parametrize("size", [*range(30, 60), 10_000])
def test_a_form_is_read_in_pieces_of_any_size(
    size: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BUFFER_BYTES", size)
    contents = [b"\r\n--a" * number + b"\r\n--" for number in range(9)]
    form = b"".join(map(part, contents)) + part(b"1", "last", None) + b"--b--"
    for end in (b"", b"\r\n", b"\r\n\r\n"):
        body = begin(FORM, form + end, path)
        assert body.parameters == b'{"last":1}'
        assert [each.payload for each in body.instances()] == contents


def test_the_inputs_of_a_model_with_several_are_one_instance(path: Path) -> None:
    form = part(b"[1, 2]", "a", None) + part(b"3", "b", None) + b"--b--"
    (instance,) = read(FORM, form, path, head(inputs=TWO))
    assert json.loads(instance.payload) == {"a": [1, 2], "b": 3}
    with pytest.raises(TooLargeError, match="the body is larger than the limit of 100 bytes"):
        read(FORM, form, path, head(inputs=TWO, max_body_bytes=100))
    assert len(read(FORM, part(b"x") + part(b"y") + b"--b--", path, head(inputs=TWO))) == 2


# Other types


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (b"application/json", b'{"instances": [1, {"b64": "eA=="}], "parameters": {"a": 1}}'),
        (b"image/jpeg", JPEG),
        (b"text/plain", b"a text"),
        (b"application/x-npy", npy(np.ones((3, 2), np.float32))),
        (b"application/octet-stream", b"x" * 24),
        (b"application/x-www-form-urlencoded", b'{"instances": [1]}'),
    ],
)
def test_any_other_body_is_read_as_predict_reads_it(
    content_type: bytes, body: bytes, path: Path
) -> None:
    asked = head(b"top_k=3", inputs=[spec(-1, 2)])
    expected = decode(content_type, [body], asked)
    found = begin(content_type, body, path, asked)
    assert found.parameters == expected.parameters
    assert [(each.kind, each.payload, each.headers) for each in found.instances()] == [
        (each.kind, body_of(each), each.headers) for each in expected.payloads
    ]


def test_a_job_may_have_more_instances_than_a_call(path: Path) -> None:
    def body(num: int) -> bytes:
        return b'{"instances": [%s]}' % b",".join([b"1"] * num)

    assert len(read(b"application/json", body(16_384), path, head(max_instances=2))) == 16_384
    with pytest.raises(TooLargeError, match="application/jsonl and application/x-tar may hold"):
        read(b"application/json", body(16_385), path)
    assert len(read(b"application/json", body(20_000), path, head(max_instances=20_000))) == 20_000


def test_a_body_that_is_read_whole_keeps_the_limits_of_calls(path: Path) -> None:
    with pytest.raises(TooLargeError, match=r"the limit of 100 bytes\. application/jsonl and"):
        begin(b"image/jpeg", b"x" * 101, path, head(max_body_bytes=100))
    with pytest.raises(TooLargeError, match="max_json_bytes"):
        begin(b"application/json", b" " * 101, path, head(max_json_bytes=100))


def test_unknown_types_are_refused(path: Path) -> None:
    for content_type in (b"", b"text/csv", b"application/gzip"):
        with pytest.raises(UnsupportedTypeError, match="application/jsonl, application/x-tar"):
            begin(content_type, b"x", path)


def test_parameters_come_from_the_query_of_lines_and_archives(path: Path) -> None:
    for content_type, body in ((JSONL, b"1"), (TAR, archive_of(("a", b"x")))):
        assert (
            begin(content_type, body, path, head(b"top_k=3&dtype=x")).parameters == b'{"top_k":3}'
        )
        with pytest.raises(TooLargeError, match="parameters"):
            begin(content_type, body, path, head(b"a=" + b"1" * 20_000))


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (JSONL, b"1\n" * 4),
        (JSONL, b"{\n" * 4),
        (JSONL, b"1" + b"\n" * 5 + b"1"),
        (TAR, archive_of(*[("a", b"x")] * 4)),
        (FORM, part(b"x") * 4 + b"--b--"),
        (FORM, part(npy(np.ones((4, 2), np.float32))) + b"--b--"),
    ],
)
def test_more_instances_than_a_job_may_have_are_refused(
    content_type: bytes, body: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = head(inputs=[spec(-1, 2)])
    monkeypatch.setattr(reading, "MAX_INSTANCES", 3)
    with pytest.raises(TooLargeError, match="more than 3"):
        read(content_type, body, path, asked)
    monkeypatch.setattr(reading, "MAX_INSTANCES", 6)
    assert read(content_type, body, path, asked)


@pytest.mark.parametrize(
    ("content_type", "good"),
    [
        (JSONL, b'{"b64": "eA=="}\n[1, "\xc3\xbc"]\n{"a": {"b": null}}\n"x"\n'),
        (TAR, archive_of(("a" * 150 + ".json", b"[1]"), ("b.npy", npy(np.ones(2))))),
        (
            FORM,
            part(b"3", "top_k", None)
            + part(npy(np.ones((2, 2), np.float32)))
            + part(JPEG, type="image/jpeg")
            + b"--b--\r\n",
        ),
    ],
    ids=["jsonl", "tar", "form"],
)  # fmt: skip
def test_damaged_bodies_make_instances_or_a_typed_error(
    content_type: bytes, good: bytes, path: Path
) -> None:
    random = Random(7)
    asked = head(inputs=[spec(-1, 2)], max_body_bytes=2000)
    num_read = 0
    for _ in range(500):
        body = mutate(random, good, [good])
        if content_type == TAR and random.random() < 0.7:  # look behind the checksums
            blocks = [body[start : start + 512] for start in range(0, len(body), 512)]
            body = b"".join(
                with_checksum(each) if b"ustar" in each and len(each) == 512 else each
                for each in blocks
            )
        try:
            found = read(content_type, body, path, asked)
        except ServiceError:
            continue
        num_read += 1
        assert found
        for each in found:
            assert (each.kind is None) == (each.problem is not None)
            encoded = msgspec.msgpack.encode(each)
            assert msgspec.msgpack.decode(encoded, type=StoredInstance) == each
    assert num_read > 30


def test_a_body_is_read_with_a_pause_now_and_then_for_the_event_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pauses_s = itertools.count(step=0.0001), list[float]()
    clock = SimpleNamespace(monotonic=lambda: next(now), sleep=pauses_s.append)
    monkeypatch.setattr(reading, "time", clock)
    for content_type, body in ((JSONL, b"1\n" * 1000), (FORM, part(b"x") * 1000 + b"--b--")):
        pauses_s.clear()
        assert len(read(content_type, body, path)) == 1000
        assert len(pauses_s) > 100  # one for some five instances
        assert all(pauses_s)


PEAK = """
import sys
from pathlib import Path
from inferpool.service.parts.jobs.http.reading import read_body
from tests.service.api.fakes import head

def peak():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024

content_type, small, large = sys.argv[1].encode(), Path(sys.argv[2]), Path(sys.argv[3])
read = lambda path: sum(1 for _ in read_body(content_type, path, head()).instances())
read(small)
before = peak()
print(read(large), peak() - before)
"""


@pytest.mark.measures
@pytest.mark.slow
@pytest.mark.parametrize(
    ("content_type", "begin", "one", "end"),
    [
        (JSONL, b"", b'"%s"\n' % (b"x" * 997), b""),
        (TAR, b"", archive_of(("a.jpg", b"x" * 512))[:1024], bytes(1024)),
        (FORM, b"", part(b"x" * 1000, type="image/jpeg"), b"--b--"),
        (JSONL, b'"', b"x" * 1000, b'"\n1\n'),
        (FORM, part(b"")[:-2], b"x" * 1000, b"\r\n--b--"),
    ],
    ids=["jsonl", "tar", "form", "one-line", "one-file"],
)
def test_a_body_of_100_mb_is_never_whole_in_memory(
    content_type: bytes, begin: bytes, one: bytes, end: bytes, tmp_path: Path
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for path, num in ((small, 10), (large, 100_000)):
        with path.open("wb") as file:
            file.write(begin)
            for _ in range(10):
                file.write(one * (num // 10))
            file.write(end)
    command = [sys.executable, "-c", PEAK, content_type.decode(), str(small), str(large)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    num, mib = ran.stdout.split()
    assert int(num) == (100_000 if not begin else 2 if content_type == JSONL else 1)
    # One instance may have 16 MiB, and is held twice while it is put together.
    assert float(mib) < (4 if not begin else 40)
