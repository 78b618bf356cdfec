"""Pieces of requests, JSON and forms that have hurt some server; inputs are made of them."""

QUERIES = (
    "?top_k=3",
    "?top_k=-1",
    "?top_k=1e999",
    "?top_k=%00",
    "?shape=3&dtype=float32",
    "?name=x",
    "?shape=99999999999999,9999999999999&dtype=uint8",
    "?shape=-1&dtype=float32",
    "?dtype=object",
    "?" + "a=1&" * 100,
    "?output=sum",
    "?output=nothing",
    "?top_k=[[[[[",
    "?x=%ff%fe",
    "?&&&=&=",
    "?shape=" + "1," * 40 + "&dtype=uint8",
    "?name=" + "n" * 3000,
    "?top_k=3&top_k=4",
    "?shape=2,3,4&dtype=float32&name=image",
    "?dtype=float32&shape=",
)

SIZES = (
    *("0", "0", "0", "1", "3", "65536", "2147483648", "4294967296", "4611686018427387904"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "1" + "0" * 30),
    "1" + "0" * 5000,
)
"""Lengths of a tensor's dimensions; with a 0 among them, no bytes need to be there."""

TENSOR_NAMES = (
    *("", "x", "ids", "sum", "a\r\nx-evil: 1", "a\nx-evil: 1", "a\rx-evil: 1"),
    *("a\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "\0", "\x7f", "\x85\u2028", "\u00fc", "\U0001f600"),
    *("a: b", '"', "%0d%0a", " x ", "n" * 3000),
)

HEADERS = (
    "x-timeout-ms: 0",
    "x-timeout-ms: 99999999999999",
    "x-timeout-ms: 1",
    "x-timeout-ms: -5",
    "x-priority: 0",
    "x-priority: 1",
    "x-priority: x",
    "x-priority: 1, 2",
    "accept: text/html",
    "accept: application/x-npy",
    "accept: application/safetensors",
    "accept: application/octet-stream",
    "accept: application/json;q=nan",
    "accept: */*;q=0",
    "accept: ,;,;=",
    "accept: " + "a/b," * 500,
    "traceparent: 00-0-0-0",
    "traceparent: " + "f" * 500,
    "traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01\r\ntracestate: a=\tb\x85",
    "tracestate: " + "a=b," * 200,
    "origin: http://a\x0b",
    "x-tensor-dtype: float32",
    "x-tensor-shape: 2,3,4",
    "x-tensor-shape: [",
    "content-encoding: gzip",
    "content-encoding: identity",
    "content-encoding: br, gzip",
    "x-request-id: \xff\xfe",
    "cookie: a=b",
    "content-type: image/png",
    "content-type: ;;;;",
    "expect: 100-continue",
    "connection: upgrade",
    "upgrade: websocket",
    "range: bytes=0-",
    "if-match: *",
    "x-forwarded-for: 1.2.3.4",
    "x: " + "y" * 9000,
)

PATHS = (
    "/",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/predict",
    "/predict/",
    "/predict/nothing",
    "/predict/%2e%2e/echo",
    "/predict//echo",
    "/admin",
    "/%00",
    "/a" * 500,
    "/predict/echo/x",
    "/health?verbose=1&a[]=%ff",
    "//",
    "/predict/\u00fc",
    "/static/../../etc/passwd",
)

TYPES = (
    *("", "text/plain", "application/xml", "application/x-www-form-urlencoded"),
    *("application/json; charset=utf-16", "a" * 400, "image/", "multipart/mixed"),
    *("application/json", "*/*"),
)

_CHUNKED = b"POST /predict/echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"

HEADS = (
    b"GET / HTTP/0.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"POST /predict HTTP/1.1\r\n" + b"a: b\r\n" * 3000 + b"\r\n",
    b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /predict HTTP/1.1\nhost: a\n\n",
    b"POST /predict HTTP/1.1\r\nhost: a\r\n folded: b\r\n\r\n",
    b"\0" * 1000,
    b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET http://a/predict HTTP/1.1\r\nhost: b\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
    _CHUNKED + b"ffffffffffffffff\r\n",
    _CHUNKED + b"-1\r\nx\r\n0\r\n\r\n",
    _CHUNKED + b"5;" + b"x" * 9000 + b"\r\nhello\r\n0\r\n\r\n",
    b"POST /predict/echo HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n"
    b"content-length: 3\r\n\r\nabc",
    b"HEAD /health HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST /predict/echo HTTP/1.1\r\nhost: a\r\ncontent-length: 20000000\r\n\r\n",
)

LENGTHS = (
    b"content-length: -",
    b"content-length: 9",
    b"content-length: +",
    b"content-length: 0x",
    b"content-length: 5\r\ncontent-length: ",
    b"transfer-encoding: chunked\r\ncontent-length: ",
    b"x: ",
    b"content-length: 99999999999999999999",
    b"transfer-encoding: gzip\r\nx: ",
    b"transfer-encoding: chunked\r\nx: ",
)

ATOMS = (
    *("0", "1", "-1", "0.5", "1e999", "-1e-999", "NaN", "Infinity", "-Infinity", "null"),
    *("true", "false", '""', '"x"', '"\\ud800"', '"\\u0000"', '"\\x"', "9223372036854775807"),
    *("9223372036854775808", "1" * 400, "01", "+1", ".5", "1.", "0x10", "{}", "[]"),
    *('{"b64":"AAAA"}', '{"b64":"!"}', '{"b64":1}', '{"b64":""}'),
    *('{"b64":"AAAA","b64":"AAAA"}', '{"": 0}', "'x'", '"\u00e9"', '"\ud83d\ude00"', "-"),
    *("[1,2,3]", "[1,2,[3]]", '{"x":[1,2,3],"ids":[1]}', '{"x":[1,2],"ids":[1]}'),
    *('{"x":{"b64":"AAAA"},"ids":{"b64":"!"}}', '{"x":[1,2,3],"ids":[1.5]}'),
    *('{"x":[1,2,3],"ids":[1],"x":[4,5,6]}', '{"x":[1,2,"3"],"ids":[]}'),
    '{"x":[1,2,3],"ids":[99999999999999999999]}',
)

NAMES = (
    *('"x"', '"ids"', '"image"', '"b64"', '"instances"', '"parameters"', '"\\u0000"', '"a"'),
    "x",
)

PART_NAMES = (
    *(b'name="file"; filename="a.png"', b'name="top_k"', b'name="parameters"'),
    *(b'name="x"; filename="x.npy"', b'name="x"', b'name="ids"', b'filename="b"', b'name=""'),
    *(b"", b"name=\"x\"; filename*=utf-8''%e2"),
)

PART_TYPES = (
    *(b"image/png", b"application/x-npy", b"application/json", b""),
    *(b"application/octet-stream", b"text/plain", b"multipart/mixed; boundary=x"),
)

SAFETENSORS_HEADERS = (
    *('{"x":ENTRY}', '{"x":ENTRY,"x":ENTRY}', '{"x":ENTRY,"ids":ENTRY}', "{}", "[]"),
    *('{"__metadata__":{"a":"b"}}', "{" * 500, '{"__metadata__":1,"x":ENTRY}'),
)
"""Headers of the format; ENTRY stands for what is said of a tensor."""
