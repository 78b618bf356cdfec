"""A module-level `handle()` that streams its answer."""

import time

from ts.handler_utils.utils import send_intermediate_predict_response

TEXTS = ("one ", "two ", "three é ")


def handle(data, context):
    """Send a piece after another, then the last one."""
    if data is None:
        return None
    asked = [_text(row.get("data") or row.get("body")) for row in data]
    context.set_response_header(0, "x-pieces", str(len(TEXTS)))
    for text in TEXTS:
        send_intermediate_predict_response(
            [text for _ in data],
            context.request_ids,
            "Intermediate Prediction success",
            200,
            context,
        )
        time.sleep(0.02)
        if "fail" in asked:
            raise ValueError("failed between two pieces")
    return [f"last for {text}" for text in asked]


def _text(value):
    return bytes(value).decode() if isinstance(value, bytes | bytearray) else str(value)
