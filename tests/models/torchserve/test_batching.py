"""Helpers by which handlers compute in pieces."""

import threading

import pytest
import torch

from inferpool.models.torchserve.batching import MicroBatching, TextIteratorStreamerBatch


class InThreeSteps:
    """A handler whose steps say which piece they compute."""

    def __init__(self):
        self.context = None
        self.handle = MicroBatching(self, 2)
        self.pieces = []
        self.at_once = threading.Barrier(2)

    def preprocess(self, data):
        if data == ["bad"]:
            raise ValueError("a bad piece")
        return [each * 10 for each in data]

    def inference(self, data):
        self.pieces.append(self.handle.get_micro_batch_idx())
        return [each + 1 for each in data]

    def postprocess(self, data):
        return [str(each) for each in data]


def test_a_batch_is_computed_in_pieces_and_answered_in_order():
    handler = InThreeSteps()

    assert handler.handle([1, 2, 3, 4, 5], "a context") == ["11", "21", "31", "41", "51"]
    assert sorted(handler.pieces) == [0, 1, 2]
    assert handler.context == "a context"
    handler.handle.shutdown()


def test_as_many_threads_as_wished_are_in_a_step():
    handler = InThreeSteps()
    handler.handle.parallelism = {"inference": 2}
    handler.inference = lambda data: [handler.at_once.wait(60) >= 0 for _ in data[:1]]

    assert handler.handle([1, 2, 3, 4], None) == ["True", "True"]
    assert handler.handle.parallelism == {"preprocess": 1, "inference": 2, "postprocess": 1}
    handler.handle.shutdown()


def test_a_piece_that_fails_fails_the_call():
    handler = InThreeSteps()

    with pytest.raises(ValueError, match="a bad piece"):
        handler.handle([1, 2, "bad"], None)
    with pytest.raises(ValueError, match="no step 'explain'"):
        handler.handle.parallelism = {"explain": 1}
    handler.handle.shutdown()


class Words:
    """A tokenizer of numbers."""

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens)) + " "


def test_texts_of_a_batch_are_streamed_side_by_side():
    streamer = TextIteratorStreamerBatch(Words(), 2)
    for step in range(3):
        streamer.put(torch.tensor([[step], [step + 10]]))
    streamer.end()

    steps = [[each["text"] for each in step] for step in streamer]

    assert "".join(step[0] for step in steps) == "0 1 2 "
    assert "".join(step[1] for step in steps) == "10 11 12 "
    with pytest.raises(ValueError, match="tokens of 2 texts"):
        streamer.put(torch.zeros(3, 1))
