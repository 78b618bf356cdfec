"""Hostile inputs, by number: each is the bytes of one HTTP request, or of something near one.

The same seed and number make the same input.
"""

import base64
import functools
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from urllib.parse import quote

import numpy as np
from PIL import Image
from safetensors.numpy import save as save_safetensors

from tests.fuzz import bombs, dictionary
from tests.fuzz.mutate import mutate
from tests.models.items import encoded, photo

_BOUNDARY = b"0123456789abcdef"
_DTYPES = ("<f4", "<f4", "<f4", "<i8", "|u1", ">f4", "<f8", "|b1", "<f2", "<u2")
_PERCENT = {
    "json": 20,
    "image": 13,
    "npy": 13,
    "safetensors": 11,
    "raw": 8,
    "shape": 12,
    "form": 7,
    "head": 9,
    "other": 7,
}
"""How many of a hundred inputs are of each kind."""
KINDS = tuple(_PERCENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileInput:
    """Bytes to send over one connection."""

    number: int
    kind: str
    data: bytes
    is_framed: bool
    """True for one whole request as HTTP has it: exactly one answer is due, and the connection can
    go on. Any other input has a connection of its own, which may be closed instead."""


def make_input(seed: int, number: int) -> HostileInput:
    """Return the input of a number."""
    maker = RequestMaker(f"{seed}-{number}")
    kind = maker.choices(KINDS, list(_PERCENT.values()))[0]
    data = getattr(maker, f"{kind}_request")(number)
    is_framed = kind not in ("head", "other")
    return HostileInput(number=number, kind=kind, data=data, is_framed=is_framed)


class RequestMaker(Random):
    """Makes one input, by its own stream of random numbers."""

    def framed(
        self, number: int, target: str, content_type: str, body: bytes, *headers: str
    ) -> bytes:
        """Return a whole request."""
        if not headers and self.random() < 0.15:
            headers = (self.choice(dictionary.HEADERS),)
        head = "\r\n".join(
            [
                f"POST {target} HTTP/1.1",
                "host: fuzz",
                f"x-request-id: fuzz-{number}",
                f"content-type: {content_type}",
                *headers,
            ]
        ).encode("latin-1", "replace")
        if self.random() < 0.05:
            return head + b"\r\ntransfer-encoding: chunked\r\n\r\n" + self.chunked(body)
        return head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    def chunked(self, body: bytes) -> bytes:
        pieces = []
        while body:
            size = self.choice((1, 7, 64, 1000, 100_000)) if len(pieces) < 200 else len(body)
            piece, body = body[:size], body[size:]
            pieces.append(b"%x\r\n" % len(piece) + piece + b"\r\n")
        return b"".join(pieces) + b"0\r\n\r\n"

    def target(self, *models: str) -> str:
        return f"/predict/{self.choice(models)}" + self.choice(("",) * 12 + dictionary.QUERIES)

    # JSON

    def json_request(self, number: int) -> bytes:
        body = self.json_text()
        if self.random() < 0.5:
            body = mutate(self, body, [self.json_text()])
        target = self.target("echo", "two", "two", "grid", "grid", "decoder")
        return self.framed(number, target, "application/json", body)

    def json_text(self) -> bytes:
        match self.randrange(12):
            case 0:
                depth = self.choice((50, 99, 101, 1000, 20_000))
                text = '{"instances":[' + "[" * depth + "]" * self.choice((depth, 0)) + "]}"
            case 1:
                instances = [{"x": [1, 2, 3], "ids": [1]}] * self.choice((1, 3, 300))
                text = json.dumps({"instances": instances})
            case 2:
                grid = [[[self.random()] * 4] * 3] * 2
                text = json.dumps({"instances": [grid], "parameters": {"top_k": 2}})
            case 3:
                image = base64.b64encode(self.image()).decode()
                text = json.dumps({"instances": [{"b64": image}] * self.choice((1, 1, 2))})
            case 4:
                text = '{"instances":[[' + "[1,2,3]," * self.choice((10, 3000)) + "[1,2]]]}"
            case _:
                parameters = ',"parameters":' + self.json_value(2)
                num = self.choice((0, 1, 1, 1, 2, 5))
                items = ",".join(self.json_value(4) for _ in range(num))
                more = self.choice(("", "", parameters, ',"instances":[]'))
                text = '{"instances":[' + items + "]" + more + "}"
        return text.encode("utf-8", "surrogatepass")

    def json_value(self, depth: int) -> str:
        choice = self.random()
        if depth <= 0 or choice < 0.45:
            return self.choice(dictionary.ATOMS)
        if choice < 0.75:
            values = (self.json_value(depth - 1) for _ in range(self.randrange(5)))
            return "[" + ",".join(values) + "]"
        pairs = (
            f"{self.choice(dictionary.NAMES)}:{self.json_value(depth - 1)}"
            for _ in range(self.randrange(4))
        )
        return "{" + ",".join(pairs) + "}"

    # Images

    def image_request(self, number: int) -> bytes:
        # The default model's forward pass takes 10 ms and more, so few get as far.
        target = "/predict" if self.random() < 0.06 else self.target("decoder")
        content_type = self.choice(("image/jpeg", "image/png", "image/webp", "image/x", "IMAGE/*"))
        return self.framed(number, target, content_type, self.image())

    def image(self) -> bytes:
        if self.random() < 0.05:
            return self.choice(_bombs())
        return mutate(self, self.choice(_images()), _images())

    # Tensors

    def npy_request(self, number: int) -> bytes:
        target = self.target("echo", "grid", "grid", "decoder", "two")
        body = mutate(self, self.npy(), [self.npy()])
        return self.framed(number, target, "application/x-npy", body)

    def npy(self) -> bytes:
        file = io.BytesIO()
        if self.random() < 0.03:
            np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
            return file.getvalue()
        shapes = ((3,), (2, 3), (2, 3, 4), (5, 2, 3, 4), (), (0,), (0, 3), (300, 3), (40, 40, 3))
        order = self.choice(("C", "C", "F"))
        array = np.zeros(self.choice(shapes), self.choice(_DTYPES), order=order)
        np.save(file, array, allow_pickle=False)
        return file.getvalue()

    def safetensors_request(self, number: int) -> bytes:
        body = mutate(self, self.safetensors(), [self.safetensors()])
        target = self.target("two", "two", "two", "echo", "decoder")
        return self.framed(number, target, "application/safetensors", body)

    def safetensors(self) -> bytes:
        if self.random() < 0.3:
            begin, end = self.choice(((0, 12), (0, 2**63), (12, 0), (-4, 8), (0, 0), (8, 20)))
            shape = self.choice(("[3]", "[4294967296,4294967296]", "[-1]", "[]", "[1.5]", "3"))
            entry = f'{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}'
            text = self.choice(dictionary.SAFETENSORS_HEADERS).replace("ENTRY", entry)
            size = self.choice((len(text), 0, 2**63, 2**64 - 1, len(text) + 1))
            return size.to_bytes(8, "little") + text.encode() + bytes(12)
        lead = self.choice(((), (), (1,), (2,), (300,)))
        ids = np.zeros((*lead, self.choice((1, 4))), np.int64)
        return save_safetensors({"x": np.zeros((*lead, 3), np.float32), "ids": ids})

    def raw_request(self, number: int) -> bytes:
        body = self.randbytes(self.choice((0, 1, 11, 12, 48, 96, 100, 960, 5000)))
        target = self.target("echo", "grid", "two", "decoder")
        if self.random() < 0.5:
            shape = self.choice(("3", "2,3,4", "1,2,3,4", "4,3", "0", "2,2,3", "96", "8,4,3"))
            dtype = self.choice(("float32", "uint8", "bool", "bfloat16", "int64"))
            target = f"{target.partition('?')[0]}?dtype={dtype}&shape={shape}"
        return self.framed(number, target, "application/octet-stream", body)

    def shape_request(self, number: int) -> bytes:
        """Return a tensor in a valid form, with lengths and a name that nobody foresaw."""
        sizes = dictionary.SIZES[:5] if self.random() < 0.5 else dictionary.SIZES
        sizes = self.choices(sizes, k=self.choice((1, 2, 2, 3, 4, 17)))
        num_bytes = prod(map(int, sizes)) if max(map(len, sizes)) < 20 else 0
        data = bytes(num_bytes if num_bytes <= 4096 else 0)
        shape, name = ",".join(sizes), self.choice(dictionary.TENSOR_NAMES)
        target = f"/predict/{self.choice(('echo', 'echo', 'echo', 'two', 'grid', 'decoder'))}"
        content_type = self.choice(("safetensors", "safetensors", "x-npy", "octet-stream"))
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
        wanted = self.choice(("*/*", "x-npy", "safetensors", *["octet-stream"] * 3))
        accept = f"accept: {wanted if '/' in wanted else 'application/' + wanted}"
        return self.framed(number, target, f"application/{content_type}", body, accept)

    # Forms

    def form_request(self, number: int) -> bytes:
        body = self.form()
        if self.random() < 0.5:
            body = mutate(self, body, [body])
        boundary = self.choice((_BOUNDARY.decode(),) * 9 + ("", "x", '"', "a" * 300))
        content_type = f"multipart/form-data; boundary={boundary}"
        if self.random() < 0.03:
            content_type = "multipart/form-data"
        target = self.target("decoder", "echo", "grid", "two")
        return self.framed(number, target, content_type, body)

    def form(self) -> bytes:
        parts: list[bytes] = []
        for _ in range(self.choice((0, 1, 1, 2, 3, 70, 400))):
            head = b"content-disposition: form-data; " + self.choice(dictionary.PART_NAMES)
            if part_type := self.choice(dictionary.PART_TYPES):
                head += b"\r\ncontent-type: " + part_type
            if self.random() < 0.02:
                head += b"\r\nx: " + b"y" * 20_000
            content = b"3"
            if len(parts) < 4:
                contents = (self.image, self.npy, lambda: b'{"top_k": 2}', lambda: b"3")
                content = self.choice(contents)()
            parts.append(b"--" + _BOUNDARY + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n")
        return b"".join(parts) + b"--" + _BOUNDARY + b"--\r\n"

    # Heads

    def other_request(self, _: int) -> bytes:
        """Return a whole request with another method, path, type or header."""
        method = self.choice(("GET", "GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"))
        lines = [f"{method} {self.choice(dictionary.PATHS)} HTTP/1.1", "host: fuzz"]
        lines += self.choices(dictionary.HEADERS, k=self.choice((0, 0, 1, 3)))
        if content_type := self.choice(dictionary.TYPES):
            lines.append(f"content-type: {content_type}")
        body = mutate(self, self.json_text()) if method in ("POST", "PUT", "PATCH") else b""
        head = "\r\n".join([*lines, f"content-length: {len(body)}"]).encode("latin-1", "replace")
        return head + b"\r\n\r\n" + body

    def head_request(self, number: int) -> bytes:
        """Return something that is nearly a request."""
        whole = self.json_request(number)
        if self.random() < 0.35:
            whole = whole.replace(b"content-length: ", self.choice(dictionary.LENGTHS), 1)
        head, _, body = whole.partition(b"\r\n\r\n")
        if self.random() < 0.75:
            head = mutate(self, head, dictionary.HEADS)
        if self.random() < 0.1:
            return self.choice(dictionary.HEADS)
        return head + b"\r\n\r\n" + body


@functools.cache
def _images() -> Sequence[bytes]:
    """Return small photographs, in every format and mode that there is."""
    found = []
    for name, size in (("astronaut", (48, 40)), ("coffee", (33, 60)), ("chelsea", (20, 20))):
        image = photo(name).resize(size)
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
                found.append(encoded(converted, form))
        exif = Image.Exif()
        exif[0x0112] = 6
        found += [encoded(image, form, exif=exif) for form in ("JPEG", "PNG", "WEBP", "TIFF")]
        found.append(encoded(image, "JPEG", progressive=True))
        for compression in ("tiff_lzw", "jpeg", "tiff_deflate"):
            found.append(encoded(image, "TIFF", compression=compression))
        found.append(encoded(image, "WEBP", lossless=True))
        found.append(encoded(image, "PNG", save_all=True, append_images=[image, image]))
    return found


@functools.cache
def _bombs() -> Sequence[bytes]:
    """Return bombs that are small as files."""
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
