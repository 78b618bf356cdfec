"""Calls over HTTP by hand, which no client's library makes: `python raw_calls.py http ADDRESS`."""

import base64
import gzip
import http.client
import json
import struct
import sys
import time
import zlib

from telling import KEY, named, shown, tell

ADDRESS = sys.argv[2]
LENGTH = "Inference-Header-Content-Length"
INFER = "/v2/models/{}/infer"
ONES = [0, 1, 2, 3]


def call(name, method, path, body=b"", headers=None):
    """Send one request; tell its status, some headers, and the body as JSON, text or base64."""
    connection = http.client.HTTPConnection(ADDRESS, timeout=30)
    try:
        connection.request(method, path, body, {**named(name), **(headers or {})})
        response = connection.getresponse()
        found = response.read()
    except OSError as error:
        tell(name, error=shown(error))
        wait_until_ready()  # Triton is started again where a call has ended it
        return
    finally:
        connection.close()
    encoding = response.headers.get("Content-Encoding", "")
    if encoding == "gzip":
        found = gzip.decompress(found)
    elif encoding == "deflate":
        found = zlib.decompress(found)
    length = response.headers.get(LENGTH)
    header, rest = (found, b"") if length is None else (found[: int(length)], found[int(length) :])
    answer = {"status": response.status, "encoding": encoding, "has length": length is not None}
    try:
        answer["json"] = json.loads(header) if header else None
    except ValueError:
        answer["text"] = header.decode(errors="replace")
    if rest:
        answer["binary"] = base64.b64encode(rest).decode()
    tell(name, answer)


def wait_until_ready():
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            connection = http.client.HTTPConnection(ADDRESS, timeout=5)
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)


def infer(name, model, request, binary=b"", length=None, headers=None, path=None):
    """Send a request for inference, with what follows its JSON, and any header length."""
    text = request if isinstance(request, bytes) else json.dumps(request).encode()
    sent = dict(headers or {})
    if length is not None or binary:
        sent[LENGTH] = str(len(text) if length is None else length)
    call(name, "POST", path or INFER.format(model), text + binary, sent)


def one(name, shape, datatype, data=None, **parameters):
    made = {"name": name, "shape": shape, "datatype": datatype}
    if data is not None:
        made["data"] = data
    if parameters:
        made["parameters"] = parameters
    return made


def pair(**more):
    inputs = [one("INPUT0", [1, 4], "INT32", ONES), one("INPUT1", [1, 4], "INT32", ONES)]
    return {"inputs": inputs, **more}


def x(shape, data=None, **parameters):
    return {"inputs": [one("x", shape, "FP32", data, **parameters)]}


def main():
    as_json()
    health()
    bad_json()
    as_binary()
    bad_binary()
    raw_bodies()
    classes()
    encoded()
    types_and_parameters()


def health():
    for path in (
        "/v2",
        "/v2/",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/add_sub",
        "/v2/models/add_sub/ready",
        "/v2/models/add_sub/config",
        "/v2/models/add_sub/stats",
        "/v2/models/stats",
        "/v2/models/add_sub/versions/1",
        "/v2/models/add_sub/versions/1/ready",
        "/v2/models/add_sub/versions/1/config",
        "/v2/models/add_sub/versions/1/stats",
        "/v2/models/nobody",
        "/v2/models/nobody/ready",
        "/v2/models/nobody/config",
        "/v2/models/nobody/stats",
        "/v2/models/add_sub/versions/9",
        "/v2/models/add_sub/nothing",
        "/v2/nothing",
        "/v2/models",
    ):
        call(f"GET {path}", "GET", path)
    call("index", "POST", "/v2/repository/index", b"{}")
    call("index without a body", "POST", "/v2/repository/index")
    call("index of those that are ready", "POST", "/v2/repository/index", b'{"ready": true}')
    call("POST of the metadata", "POST", "/v2/models/add_sub", b"{}")
    call("GET of infer", "GET", INFER.format("add_sub"))


def as_json():
    infer("flat", "add_sub", pair())
    nested = [
        one("INPUT0", [2, 4], "INT32", [ONES, ONES]),
        one("INPUT1", [2, 4], "INT32", ONES * 2),
    ]
    infer("nested and flat", "add_sub", {"inputs": nested, "id": "7"})
    infer("an id that is empty", "add_sub", pair(id=""))
    infer("an id of other letters", "add_sub", pair(id='h\u00e9 "quoted"'))
    infer("an id that is a number", "add_sub", pair(id=7))
    infer("a version", "add_sub", pair(), path="/v2/models/add_sub/versions/1/infer")
    infer("an unknown version", "add_sub", pair(), path="/v2/models/add_sub/versions/9/infer")
    infer("outputs are null", "add_sub", pair(outputs=None))
    infer("no outputs are asked for", "add_sub", pair(outputs=[]))
    infer("one output", "add_sub", pair(outputs=[{"name": "SUM"}]))
    infer("an output twice", "add_sub", pair(outputs=[{"name": "SUM"}, {"name": "SUM"}]))
    infer("an unknown output", "add_sub", pair(outputs=[{"name": "nothing"}]))
    infer("keys that nobody knows", "add_sub", pair(unknown=1))
    infer("texts", "lengths", {"inputs": [one("input", [2, 1], "BYTES", ["a", "\u00e9"])]})
    infer("texts, nested", "lengths", {"inputs": [one("input", [2, 1], "BYTES", [["a"], ["bb"]])]})
    infer("an empty tensor", "any_size", x([1, 0], []))
    infer("a number that is no float", "any_size", x([1, 2], [1, 2.5]))
    infer("a stream's model", "counts", {"inputs": [one("n", [1, 1], "INT32", [2])]})


def bad_json():
    for name, body in (
        ("not JSON", b"{nope"),
        ("an empty body", b""),
        ("a list", b"[]"),
        ("null", b"null"),
        ("an empty object", b"{}"),
        ("no UTF-8", b'{"inputs": "\xff"}'),
        ("NaN", b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[NaN]}]}'),
        ("deep", b"[" * 5000),
        ("text after it", json.dumps(pair()).encode() + b"}"),
    ):
        infer(name, "add_sub" if name != "NaN" else "any_size", body)
    for name, inputs in (
        ("inputs are no list", {"x": 1}),
        ("no inputs", []),
        ("an input is no object", [1]),
        ("no name", [{"shape": [1, 1], "datatype": "FP32", "data": [1]}]),
        ("no shape", [{"name": "x", "datatype": "FP32", "data": [1]}]),
        ("no datatype", [{"name": "x", "shape": [1, 1], "data": [1]}]),
        ("no data", [one("x", [1, 1], "FP32")]),
        ("an unknown datatype", [one("x", [1, 1], "FP99", [1])]),
        ("a negative size", [one("x", [1, -1], "FP32", [1])]),
        ("a size that is no number", [one("x", [1, "1"], "FP32", [1])]),
        ("a size that is huge", [one("x", [1, 1 << 62], "FP32", [1])]),
        ("too few values", [one("x", [1, 2], "FP32", [1])]),
        ("too many values", [one("x", [1, 2], "FP32", [1, 2, 3])]),
        ("a text for a number", [one("x", [1, 1], "FP32", ["a"])]),
        ("an uneven list", [one("x", [2, 2], "FP32", [[1, 2], [3]])]),
        ("wrong rank", [one("x", [2], "FP32", [1, 2])]),
        ("wrong datatype", [one("x", [1, 1], "INT32", [1])]),
        ("an unknown input", [one("z", [1, 1], "FP32", [1])]),
        ("a batch of none", [one("x", [0, 2], "FP32", [])]),
        ("too large a batch", [one("x", [9, 1], "FP32", [0] * 9)]),
    ):
        infer(name, "any_size", {"inputs": inputs})
    infer("a float for an integer", "fails", {"inputs": [one("x", [1, 1], "INT32", [1.5])]})
    infer("an integer too large", "fails", {"inputs": [one("x", [1, 1], "INT32", [1 << 31])]})
    infer("missing input", "add_sub", {"inputs": pair()["inputs"][:1]})
    infer("unknown model", "nobody", pair())
    infer("the model fails", "fails", {"inputs": [one("x", [1, 1], "INT32", [-1])]})
    halves = [one("IN_FP16", [1, 2], "FP16", [0.5, 1]), one("IN_BF16", [1, 2], "BF16", [0.5, 1])]
    infer("halves as JSON", "halves", {"inputs": halves})


def as_binary():
    data = struct.pack("<4f", 1, 2, 3, 4)
    infer("binary", "any_size", x([2, 2], binary_data_size=16), data)
    infer(
        "binary, an answer too",
        "any_size",
        {**x([2, 2], binary_data_size=16), "parameters": {"binary_data_output": True}},
        data,
    )
    infer(
        "JSON, the answer binary",
        "any_size",
        {**x([1, 2], [1, 2]), "parameters": {"binary_data_output": True}},
    )
    infer(
        "binary_data wins",
        "any_size",
        {
            **x([2, 2], binary_data_size=16),
            "parameters": {"binary_data_output": True},
            "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
        },
        data,
    )
    infer(
        "one output of each form",
        "add_sub",
        pair(
            outputs=[{"name": "SUM", "parameters": {"binary_data": True}}, {"name": "DIFFERENCE"}]
        ),
    )
    ints = struct.pack("<4i", *ONES)
    mixed = [
        one("INPUT0", [1, 4], "INT32", binary_data_size=16),
        one("INPUT1", [1, 4], "INT32", ONES),
    ]
    infer("one input of each form", "add_sub", {"inputs": mixed}, ints)
    elements = b"".join(struct.pack("<I", len(each)) + each for each in (b"", b"\xff\x00a"))
    infer(
        "texts as binary",
        "lengths",
        {"inputs": [one("input", [2, 1], "BYTES", binary_data_size=len(elements))]},
        elements,
    )
    halves = [
        one("IN_FP16", [1, 2], "FP16", binary_data_size=4),
        one("IN_BF16", [1, 2], "BF16", binary_data_size=4),
    ]
    infer(
        "halves as binary",
        "halves",
        {"inputs": halves, "parameters": {"binary_data_output": True}},
        bytes(range(8)),
    )
    infer("halves, the answer as JSON", "halves", {"inputs": halves}, bytes(range(8)))
    infer(
        "an empty tensor as binary",
        "any_size",
        {**x([1, 0], binary_data_size=0), "parameters": {"binary_data_output": True}},
    )
    infer(
        "the header length is all",
        "any_size",
        x([1, 2], [1, 2]),
        length=len(json.dumps(x([1, 2], [1, 2]))),
    )


def bad_binary():
    data = struct.pack("<4f", 1, 2, 3, 4)
    good = x([2, 2], binary_data_size=16)
    infer("a byte too few", "any_size", good, data[:-1])
    infer("a byte too many", "any_size", good, data + b"x")
    infer("a size that is not the shape's", "any_size", x([2, 2], binary_data_size=12), data[:12])
    infer("a size below 0", "any_size", x([2, 2], binary_data_size=-16), data)
    infer("a size that is a text", "any_size", x([2, 2], binary_data_size="16"), data)
    infer("a size and data", "any_size", x([2, 2], [1, 2, 3, 4], binary_data_size=16), data)
    infer("a size without a header length", "any_size", good)
    for length in ("-1", "x", "99999", "1", "99999999999999999999"):
        infer(f"a header length of {length}", "any_size", good, data, length=length)
    for name, elements in (
        ("cut", b"\x05\0\0\0ab"),
        ("one too few", b"\1\0\0\0a"),
        ("a length cut", b"\1\0\0"),
    ):
        infer(
            f"texts: {name}",
            "lengths",
            {"inputs": [one("input", [2, 1], "BYTES", binary_data_size=len(elements))]},
            elements,
        )


def raw_bodies():
    data = struct.pack("<4f", 1, 2, 3, 4)
    infer("raw: one tensor", "any_size", b"", data, length=0)
    infer("raw: of a fixed size", "scores", b"", data, length=0)
    infer("raw: a text", "lengths", b"", b"four", length=0)
    infer("raw: wrong size", "scores", b"", data[:-4], length=0)
    infer("raw: a part of an element", "any_size", b"", data[:-1], length=0)
    infer("raw: two inputs", "add_sub", b"", data, length=0)
    infer("raw: nothing", "scores", b"", b"", length=0)


def classes():
    scores = {"inputs": [one("x", [2, 4], "FP32", [0.1, 0.9, 0.3, 0.2, 4, 1, 2, 3])]}
    for count in (1, 3, 9, 0, -1, "2", True):
        infer(
            f"classes: {count!r}",
            "scores",
            {**scores, "outputs": [{"name": "y", "parameters": {"classification": count}}]},
        )
    infer(
        "classes as binary",
        "scores",
        {
            **scores,
            "outputs": [{"name": "y", "parameters": {"classification": 2, "binary_data": True}}],
        },
    )
    infer(
        "classes without labels",
        "any_size",
        {**scores, "outputs": [{"name": "y", "parameters": {"classification": 2}}]},
    )
    infer(
        "classes of equal values",
        "any_size",
        {**x([1, 3], [1, 1, 1]), "outputs": [{"name": "y", "parameters": {"classification": 2}}]},
    )
    infer(
        "classes of integers",
        "add_sub",
        pair(outputs=[{"name": "SUM", "parameters": {"classification": 2}}]),
    )


def encoded():
    text = json.dumps(pair()).encode()
    path = INFER.format("add_sub")
    for name, data in (("gzip", gzip.compress(text)), ("deflate", zlib.compress(text))):
        call(f"{name} request", "POST", path, data, {"Content-Encoding": name})
        call(f"{name} answer", "POST", path, text, {"Accept-Encoding": name})
        call(f"{name} cut", "POST", path, data[:-9], {"Content-Encoding": name})
    call("not gzip", "POST", path, text, {"Content-Encoding": "gzip"})
    call("an unknown encoding", "POST", path, text, {"Content-Encoding": "br"})
    call("identity", "POST", path, text, {"Content-Encoding": "identity"})
    good = json.dumps(x([2, 2], binary_data_size=16)).encode()
    body = gzip.compress(good + struct.pack("<4f", 1, 2, 3, 4))
    call(
        "gzip and binary",
        "POST",
        INFER.format("any_size"),
        body,
        {"Content-Encoding": "gzip", LENGTH: str(len(good)), "Accept-Encoding": "gzip"},
    )


def types_and_parameters():
    for name, value in (
        ("priority", 1),
        ("priority", 0),
        ("priority", -1),
        ("priority", "1"),
        ("timeout", 9_000_000),
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", "1"),
        ("sequence_id", 7),
        ("sequence_start", True),
        ("headers", "a"),
        ("triton_enable_empty_final_response", True),
        ("unknown", 1.5),
        ("unknown", "text"),
        ("unknown", None),
        ("unknown", [1]),
    ):
        infer(f"{name}: {value!r}", "any_size", {**x([1, 2], [1, 2]), "parameters": {name: value}})
    infer("parameters are a list", "any_size", {**x([1, 2], [1, 2]), "parameters": []})
    for region in ("system", "cuda"):
        kind = f"/v2/{region}sharedmemory"
        call(f"{region}: status", "GET", f"{kind}/status")
        call(f"{region}: status of a region", "GET", f"{kind}/region/a/status")
        key = b'{"key": "/a", "offset": 0, "byte_size": 64}'
        call(f"{region}: register", "POST", f"{kind}/region/a/register", key)
        call(f"{region}: unregister", "POST", f"{kind}/region/a/unregister")
        call(f"{region}: unregister all", "POST", f"{kind}/unregister")
    for path in ("/v2/trace/setting", "/v2/models/add_sub/trace/setting", "/v2/logging"):
        call(f"GET {path}", "GET", path)
        call(f"POST {path}", "POST", path, b"{}")
    shared = {"shared_memory_region": "region", "shared_memory_byte_size": 16}
    infer("an input in shared memory", "any_size", x([2, 2], **shared))
    infer(
        "an output in shared memory",
        "any_size",
        {**x([1, 2], [1, 2]), "outputs": [{"name": "y", "parameters": shared}]},
    )
    for action in ("load", "unload"):
        call(f"{action} of no model", "POST", f"/v2/repository/models/nobody/{action}", b"{}")
        call(f"{action}: bad JSON", "POST", f"/v2/repository/models/half_floats/{action}", b"{")
    call(
        "load with a configuration by the key",
        "POST",
        "/v2/repository/models/half_floats/load",
        json.dumps({"parameters": {"config": "{}"}}).encode(),
        {"X-API-Key": KEY},
    )
    call(
        "load with a file by the key",
        "POST",
        "/v2/repository/models/half_floats/load",
        json.dumps({"parameters": {"file:1/model.py": "AAAA"}}).encode(),
        {"X-API-Key": KEY},
    )
    call("load", "POST", "/v2/repository/models/half_floats/load")


if __name__ == "__main__":
    main()
