"""Handlers of archives that send parts, in the loop of a worker that streams."""

import base64
import json

import pytest

from inferpool.models.torchserve.model import model_of_archive
from inferpool.models.torchserve.streaming import StreamingArchive
from tests.models.items import answers, json_item, loaded
from tests.models.torchserve.archives import make_folder
from tests.workers.streams.driven import driven

SENDER = """
import os, time
from ts.handler_utils.utils import send_intermediate_predict_response as send

ended = []

class Sender:
    def initialize(self, context):
        self.context = context

    def handle(self, data, context):
        rows = [row["body"] for row in data]
        num = max(row["parts"] for row in rows)
        try:
            for number in range(num):
                if any(row.get("raise") == number for row in rows):
                    raise RuntimeError("as asked")
                texts = [b"%d.%d\\xff" % (row["id"], number) for row in rows]
                try:
                    send(texts, context.request_ids, "Intermediate", 200, context)
                except Exception:
                    raise AssertionError("a handler must not catch the end of its call")
            if any(row.get("raise") == num for row in rows):
                raise RuntimeError("as asked")
        finally:
            if path := rows[0].get("ended"):
                with open(path, "a") as file:
                    file.write(f"{number}\\n")
        return [{"id": row["id"]} for row in rows]
"""
ENVELOPE = b'{"envelope": true}'


def sender(folder):
    make_folder(folder)
    (folder / "handler.py").write_text(SENDER)
    model = model_of_archive(folder)
    assert isinstance(model, StreamingArchive)
    return model


def asked(id: int, parts: int, **more: object) -> dict[str, object]:
    return {"id": id, "parts": parts, **more}


def data_of(part: dict[str, str]) -> bytes:
    return base64.b64decode(part["b64"])


def test_what_a_handler_sends_comes_before_what_it_returns(tmp_path):
    with driven(sender(tmp_path / "sender")) as loop:
        ((parts, error),) = loop.answer(loop.give(asked(7, 2)))

        assert error == ""
        assert [data_of(part) for part in parts[:2]] == [b"7.0\xff", b"7.1\xff"]
        assert parts[2] == {"id": 7}


def test_a_protocol_gets_each_part_with_a_head(tmp_path):
    with driven(sender(tmp_path / "sender")) as loop:
        ((parts, _),) = loop.answer(loop.give(asked(7, 1), parameters=ENVELOPE))

    found = []
    for part in parts:
        data = data_of(part)
        end = 4 + int.from_bytes(data[:4], "little")
        head = json.loads(data[4:end])
        found.append((head["status"], head["more"], head["headers"], data[end:]))
    assert found == [
        (200, True, [["ts_stream_next", "true"]], b"7.0\xff"),
        (200, False, [["ts_stream_next", "true"]], b'{\n  "id": 7\n}'),
    ]


def test_several_requests_are_answered_in_parts_by_one_call(tmp_path):
    with driven(sender(tmp_path / "sender")) as loop:
        id = loop.give(asked(1, 2), asked(2, 2))
        found = loop.answer(id)

        assert [[data_of(part) for part in parts[:2]] for parts, _ in found] == [
            [b"1.0\xff", b"1.1\xff"],
            [b"2.0\xff", b"2.1\xff"],
        ]
        assert loop.steps[0] == [(id, 0), (id, 1)]


SWAPPER = """
from ts.handler_utils.utils import send_intermediate_predict_response as send

earlier = {}

class Swapper:
    def initialize(self, context):
        self.context = context

    def handle(self, data, context):
        ids = context.request_ids
        send(["to the last"], {0: ids[len(ids) - 1]}, "Intermediate", 200, context)
        refused = False
        if earlier:
            try:
                send(["late"], earlier, "Intermediate", 200, context)
            except Exception:
                refused = True
        earlier.update(ids)
        return [refused] * len(data)
"""


def test_a_part_goes_to_the_request_of_its_id_and_to_no_later_one(tmp_path):
    make_folder(tmp_path / "swapper")
    (tmp_path / "swapper" / "handler.py").write_text(SWAPPER)
    with driven(model_of_archive(tmp_path / "swapper")) as loop:
        found = loop.answer(loop.give("a", "b"))
        assert [parts for parts, _ in found] == [[False], ["to the last", False]]
        ((parts, _),) = loop.answer(loop.give("c"))
        assert parts == ["to the last", True]


def test_a_handler_that_raises_ends_the_stream_and_the_next_is_answered(tmp_path):
    with driven(sender(tmp_path / "sender")) as loop:
        ((parts, error),) = loop.answer(loop.give(asked(1, 3, **{"raise": 2})))
        assert (len(parts), error) == (2, "model_error")
        failing, good = loop.answer(loop.give(asked(2, 1, **{"raise": 0}), asked(3, 1)))
        assert failing == ([], "model_error")
        assert good[0][-1] == {"id": 3}


def test_a_call_that_nobody_reads_ends_with_its_next_part(tmp_path):
    ended = tmp_path / "ended"
    with driven(sender(tmp_path / "sender")) as loop:
        id = loop.give(asked(1, 10**9, ended=str(ended)))
        loop.until(lambda: loop.parts[id, 0])
        loop.drop(id, 0)
        ((parts, _),) = loop.answer(loop.give(asked(2, 1)))  # it waits for the thread
        assert parts[-1] == {"id": 2}
    assert int(ended.read_text()) >= 0


THREADED = """
import queue, threading
from ts.handler_utils.utils import send_intermediate_predict_response as send

class Threaded:
    def initialize(self, context):
        self.texts = queue.Queue()

    def handle(self, data, context):
        def generate(id):
            for number in range(100):
                self.texts.put(f"{id}.{number}")
            self.texts.put(None)

        threading.Thread(target=generate, args=(data[0]["body"],)).start()
        while (text := self.texts.get()) is not None:
            send([text], context.request_ids, "Intermediate", 200, context)
        return ["end"]
"""


def test_what_a_thread_makes_for_a_call_that_nobody_reads_reaches_no_other(tmp_path):
    make_folder(tmp_path / "threaded")
    (tmp_path / "threaded" / "handler.py").write_text(THREADED)
    with driven(model_of_archive(tmp_path / "threaded")) as loop:
        id = loop.give("a")
        loop.until(lambda: loop.parts[id, 0])
        loop.drop(id, 0)
        ((parts, error),) = loop.answer(loop.give("b"))

    assert (parts, error) == ([*(f"b.{number}" for number in range(100)), "end"], "")


def test_a_handler_of_an_archive_that_does_not_stream_is_told_so(tmp_path):
    make_folder(tmp_path / "sender")
    (tmp_path / "sender" / "handler.py").write_text(SENDER)
    model = loaded(model_of_archive(tmp_path / "sender", streaming=False))

    with pytest.raises(AssertionError) as raised:
        answers(model, [json_item(asked(1, 1))])
    assert "options = { streaming = true }" in str(raised.value.__context__)
