"""Hostile inputs, by number: each is the bytes of one HTTP request, or of what is no request.

The same seed and number make the same input.
"""

import base64
import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from urllib.parse import quote

import numpy as np
from PIL import Image
from safetensors.numpy import save as save_safetensors

from tests.e2e.photos import pixels
from tests.fuzz import bombs
from tests.fuzz.dictionary import (
    ATOMS,
    HEADERS,
    HEADS,
    LENGTHS,
    NAMES,
    PART_NAMES,
    PART_TYPES,
    PATHS,
    QUERIES,
    SIZES,
    TENSOR_NAMES,
    TYPES,
)
from tests.fuzz.mutate import mutate

_BOUNDARY = b"0123456789abcdef"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What is sent over one connection."""

    number: int
    kind: str
    data: bytes
    is_framed: bool
    """It is one whole request as HTTP has it, so exactly one answer is due and the connection can
    go on; otherwise it has a connection of its own, which may be closed instead."""


def make_input(seed: int, number: int) -> Input:
    """The input of a number."""
    random = Random(f"{seed}-{number}")
    kind = random.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])[0]
    return _KINDS[kind][1](random, number, kind)


def _framed(
    random: Random, number: int, kind: str, target: str, content_type: str, body: bytes, *more: str
) -> Input:
    lines = [
        f"POST {target} HTTP/1.1",
        "host: fuzz",
        f"x-request-id: fuzz-{number}",
        f"content-type: {content_type}",
        *more,
    ]
    head = "\r\n".join(lines).encode("latin-1", "replace")
    if random.random() < 0.05:
        head += b"\r\ntransfer-encoding: chunked\r\n\r\n"
        return Input(number=number, kind=kind, data=head + _chunked(random, body), is_framed=True)
    head += b"\r\ncontent-length: %d\r\n\r\n" % len(body)
    return Input(number=number, kind=kind, data=head + body, is_framed=True)


def _chunked(random: Random, body: bytes) -> bytes:
    pieces = []
    while body:
        size = min(len(body), random.choice((1, 7, 64, 1000, 100_000)))
        pieces.append(b"%x\r\n" % size + body[:size] + b"\r\n")
        body = body[size:]
        if len(pieces) > 200:
            pieces.append(b"%x\r\n" % len(body) + body + b"\r\n" if body else b"")
            break
    return b"".join(pieces) + b"0\r\n\r\n"


def _target(random: Random, *models: str) -> str:
    return f"/predict/{random.choice(models)}" + random.choice(("",) * 12 + QUERIES)


def _extra_headers(random: Random) -> list[str]:
    return [random.choice(HEADERS)] if random.random() < 0.15 else []


# JSON


def _json_value(random: Random, depth: int) -> str:
    choice = random.random()
    if depth <= 0 or choice < 0.45:
        return random.choice(ATOMS)
    if choice < 0.75:
        return (
            "[" + ",".join(_json_value(random, depth - 1) for _ in range(random.randrange(5))) + "]"
        )
    pairs = (
        f"{random.choice(NAMES)}:{_json_value(random, depth - 1)}"
        for _ in range(random.randrange(4))
    )
    return "{" + ",".join(pairs) + "}"


def _json_text(random: Random) -> bytes:
    choice = random.randrange(12)
    if choice == 0:
        depth = random.choice((50, 99, 101, 1000, 20_000))
        text = '{"instances":[' + "[" * depth + "]" * random.choice((depth, 0)) + "]}"
    elif choice == 1:
        text = json.dumps(
            {"instances": [{"x": [1, 2, 3], "ids": [1]}] * random.choice((1, 3, 300))}
        )
    elif choice == 2:
        text = json.dumps(
            {"instances": [[[[random.random()] * 4] * 3] * 2], "parameters": {"top_k": 2}}
        )
    elif choice == 3:
        image = base64.b64encode(_image(random)).decode()
        text = json.dumps({"instances": [{"b64": image}] * random.choice((1, 1, 2))})
    elif choice == 4:
        text = '{"instances":[[' + "[1,2,3]," * random.choice((10, 3000)) + "[1,2]]]}"
    else:
        parameters = random.choice(
            ("", "", ',"parameters":' + _json_value(random, 2), ',"instances":[]')
        )
        items = ",".join(_json_value(random, 4) for _ in range(random.choice((0, 1, 1, 1, 2, 5))))
        text = '{"instances":[' + items + "]" + parameters + "}"
    return text.encode("utf-8", "surrogatepass")


def _json_input(random: Random, number: int, kind: str) -> Input:
    body = _json_text(random)
    if random.random() < 0.5:
        body = mutate(random, body, [_json_text(random)])
    target = _target(random, "echo", "two", "two", "grid", "grid", "decoder")
    return _framed(random, number, kind, target, "application/json", body, *_extra_headers(random))


# Images


@functools.cache
def _images() -> Sequence[bytes]:
    """Small photographs, in every format and mode that there is."""
    found = []
    for name, size in (("astronaut", (48, 40)), ("coffee", (33, 60)), ("chelsea", (20, 20))):
        image = Image.fromarray(pixels(name)).resize(size)
        for form, modes in (
            ("JPEG", ("RGB", "L", "CMYK")),
            ("PNG", ("RGB", "RGBA", "P", "1", "L", "LA", "I;16")),
            ("WEBP", ("RGB", "RGBA")),
            ("GIF", ("P", "L")),
            ("BMP", ("RGB", "1", "P")),
            ("TIFF", ("RGB", "CMYK", "1", "F", "LA")),
        ):
            for mode in modes:
                converted = image.convert("L" if mode == "I;16" else mode)
                if mode == "I;16":
                    converted = Image.fromarray(np.asarray(converted).astype(np.uint16) * 257)
                found.append(_saved(converted, form))
        exif = Image.Exif()
        exif[0x0112] = 6
        found += [_saved(image, form, exif=exif) for form in ("JPEG", "PNG", "WEBP", "TIFF")]
        found.append(_saved(image, "JPEG", progressive=True))
        found.append(_saved(image, "TIFF", compression="tiff_lzw"))
        found.append(_saved(image, "TIFF", compression="jpeg"))
        found.append(_saved(image, "TIFF", compression="tiff_deflate"))
        found.append(_saved(image, "WEBP", lossless=True))
        found.append(_saved(image, "PNG", save_all=True, append_images=[image, image]))
    return found


@functools.cache
def _bombs() -> Sequence[bytes]:
    """Those that are small as files."""
    return [
        bombs.huge_webp(16_000, 16_000),
        bombs.wide_tile(30_000),
        bombs.white_png(1, 49_000_000),
        bombs.tall_strip(2**31 - 1),
        bombs.tiff_of({256: (4, 1, 8), 257: (4, 1, 8), 277: (3, 1, 65_283)}),
        bombs.png_of(bombs.png_head(50_000, 50_000), b"IDAT" + b"x" * 9),
        bombs.large_exif(100_000),
        bombs.many_scans(64, 64, 300),
        bombs.small_png(*[b"abCd"] * 20_000),
        bombs.with_segments(*[b"\xfe"] * 15_000),
        bombs.gif_of(b"!\xfe\x01x\0" * 15_000),
        bombs.png_of(bombs.png_head(0, 0), b"IEND"),
    ]


def _saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _image(random: Random) -> bytes:
    if random.random() < 0.05:
        return random.choice(_bombs())
    return mutate(random, random.choice(_images()), _images())


def _image_input(random: Random, number: int, kind: str) -> Input:
    # The default model's forward pass takes 10 ms and more, so few get as far.
    model = "/predict" if random.random() < 0.06 else _target(random, "decoder")
    content_type = random.choice(("image/jpeg", "image/png", "image/webp", "image/x", "IMAGE/*"))
    return _framed(
        random, number, kind, model, content_type, _image(random), *_extra_headers(random)
    )


# Tensors

_DTYPES = ("<f4", "<f4", "<f4", "<i8", "|u1", ">f4", "<f8", "|b1", "<f2", "<u2")


def _array(random: Random) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    shape = random.choice(
        ((3,), (2, 3), (2, 3, 4), (5, 2, 3, 4), (), (0,), (0, 3), (300, 3), (40, 40, 3))
    )
    return np.zeros(shape, random.choice(_DTYPES), order=random.choice(("C", "C", "F")))


def _npy(random: Random) -> bytes:
    file = io.BytesIO()
    if random.random() < 0.03:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    else:
        np.save(file, _array(random), allow_pickle=False)
    return file.getvalue()


def _npy_input(random: Random, number: int, kind: str) -> Input:
    target = _target(random, "echo", "grid", "grid", "decoder", "two")
    body = mutate(random, _npy(random), [_npy(random)])
    return _framed(random, number, kind, target, "application/x-npy", body, *_extra_headers(random))


def _safetensors(random: Random) -> bytes:
    if random.random() < 0.3:
        begin, end = random.choice(((0, 12), (0, 2**63), (12, 0), (-4, 8), (0, 0), (8, 20)))
        shape = random.choice(("[3]", "[4294967296,4294967296]", "[-1]", "[]", "[1.5]", "3"))
        entry = f'{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}'
        text = random.choice(
            (
                f'{{"x":{entry}}}',
                f'{{"x":{entry},"x":{entry}}}',
                f'{{"x":{entry},"ids":{entry}}}',
                "{}",
                "[]",
                '{"__metadata__":{"a":"b"}}',
                "{" * 500,
                '{"__metadata__":1,"x":' + entry + "}",
            )
        )
        size = random.choice((len(text), 0, 2**63, 2**64 - 1, len(text) + 1))
        return size.to_bytes(8, "little") + text.encode() + bytes(12)
    rows = random.choice((None, None, 1, 2, 300))
    lead = () if rows is None else (rows,)
    return save_safetensors(
        {
            "x": np.zeros((*lead, 3), np.float32),
            "ids": np.zeros((*lead, random.choice((1, 4))), np.int64),
        }
    )


def _safetensors_input(random: Random, number: int, kind: str) -> Input:
    body = mutate(random, _safetensors(random), [_safetensors(random)])
    target = _target(random, "two", "two", "two", "echo", "decoder")
    content_type = "application/safetensors"
    return _framed(random, number, kind, target, content_type, body, *_extra_headers(random))


def _raw_input(random: Random, number: int, kind: str) -> Input:
    body = random.randbytes(random.choice((0, 1, 11, 12, 48, 96, 100, 960, 5000)))
    target = _target(random, "echo", "grid", "two", "decoder")
    if random.random() < 0.5:
        shape = random.choice(("3", "2,3,4", "1,2,3,4", "4,3", "0", "2,2,3", "96", "8,4,3"))
        dtype = random.choice(("float32", "uint8", "bool", "bfloat16", "int64"))
        target = f"{target.partition('?')[0]}?dtype={dtype}&shape={shape}"
    content_type = "application/octet-stream"
    return _framed(random, number, kind, target, content_type, body, *_extra_headers(random))


def _shape_input(random: Random, number: int, kind: str) -> Input:
    """A tensor that is whole in its form, with lengths and a name that nobody foresaw."""
    usual = random.random() < 0.5
    sizes = random.choices(SIZES[:5] if usual else SIZES, k=random.choice((1, 2, 2, 3, 4, 17)))
    num_bytes = prod(map(int, sizes)) if max(map(len, sizes)) < 20 else 0
    data = bytes(num_bytes if num_bytes <= 4096 else 0)
    shape, name = ",".join(sizes), random.choice(TENSOR_NAMES)
    target = f"/predict/{random.choice(('echo', 'echo', 'echo', 'two', 'grid', 'decoder'))}"
    content_type = random.choice(("safetensors", "safetensors", "x-npy", "octet-stream"))
    if content_type == "safetensors":
        entry = f'"dtype":"U8","shape":[{shape}],"data_offsets":[0,{len(data)}]'
        text = f"{{{json.dumps(name)}:{{{entry}}}}}"
        body = len(text).to_bytes(8, "little") + text.encode() + data
    elif content_type == "x-npy":
        text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({shape},), }}"
        body = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data
        target += f"?name={quote(name, safe='')}"
    else:
        body = data
        target += f"?dtype=uint8&shape={shape[:4000]}&name={quote(name, safe='')}"
    wanted = random.choice(("*/*", "x-npy", "safetensors", *["octet-stream"] * 3))
    accept = f"accept: {wanted if '/' in wanted else 'application/' + wanted}"
    return _framed(random, number, kind, target, f"application/{content_type}", body, accept)


# Forms


def _form(random: Random) -> bytes:
    parts: list[bytes] = []
    for _ in range(random.choice((0, 1, 1, 2, 3, 70, 400))):
        name = random.choice(PART_NAMES)
        part_type = random.choice(PART_TYPES)
        if len(parts) < 4:
            content = random.choice((_image, _npy, lambda _: b'{"top_k": 2}', lambda _: b"3"))(
                random
            )
        else:
            content = b"3"
        head = b"content-disposition: form-data; " + name
        if part_type:
            head += b"\r\ncontent-type: " + part_type
        if random.random() < 0.02:
            head += b"\r\nx: " + b"y" * 20_000
        parts.append(b"--" + _BOUNDARY + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n")
    return b"".join(parts) + b"--" + _BOUNDARY + b"--\r\n"


def _form_input(random: Random, number: int, kind: str) -> Input:
    body = _form(random)
    if random.random() < 0.5:
        body = mutate(random, body, [body])
    boundary = random.choice((_BOUNDARY.decode(),) * 9 + ("", "x", '"', "a" * 300))
    content_type = f"multipart/form-data; boundary={boundary}"
    if random.random() < 0.03:
        content_type = "multipart/form-data"
    target = _target(random, "decoder", "echo", "grid", "two")
    return _framed(random, number, kind, target, content_type, body, *_extra_headers(random))


# Heads


def _other_input(random: Random, number: int, kind: str) -> Input:
    """Whole requests for other methods, paths, types and headers."""
    method = random.choice(("GET", "GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"))
    path = random.choice(PATHS)
    content_type = random.choice(TYPES)
    headers = [random.choice(HEADERS) for _ in range(random.choice((0, 0, 1, 3)))]
    body = mutate(random, _json_text(random)) if method in ("POST", "PUT", "PATCH") else b""
    lines = [f"{method} {path} HTTP/1.1", "host: fuzz", *headers]
    if content_type:
        lines.append(f"content-type: {content_type}")
    head = "\r\n".join([*lines, f"content-length: {len(body)}"]).encode("latin-1", "replace")
    return Input(number=number, kind=kind, data=head + b"\r\n\r\n" + body, is_framed=False)


def _head_input(random: Random, number: int, kind: str) -> Input:
    """What is nearly a request."""
    whole = _json_input(random, number, kind).data
    if random.random() < 0.35:
        whole = whole.replace(b"content-length: ", random.choice(LENGTHS), 1)
    head, _, body = whole.partition(b"\r\n\r\n")
    if random.random() < 0.75:
        head = mutate(random, head, HEADS)
    data = random.choice(HEADS) if random.random() < 0.1 else head + b"\r\n\r\n" + body
    return Input(number=number, kind=kind, data=data, is_framed=False)


_KINDS: Mapping[str, tuple[int, Callable[[Random, int, str], Input]]] = {
    "json": (20, _json_input),
    "image": (13, _image_input),
    "npy": (13, _npy_input),
    "safetensors": (11, _safetensors_input),
    "raw": (8, _raw_input),
    "shape": (12, _shape_input),
    "form": (7, _form_input),
    "head": (9, _head_input),
    "other": (7, _other_input),
}
"""How many of a hundred inputs are of each kind, and what makes them."""
KINDS = tuple(_KINDS)
