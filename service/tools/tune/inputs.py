"""What a service is asked while it is measured."""

from importlib.resources import files
from pathlib import Path

from inferpool.service.tools.trial.health import ModelState
from inferpool.service.tools.trial.inputs import TrialInput, is_image, made_up, read_inputs

_SEED = 1
_NUM_MADE_UP = 8
_ECHO_BYTES = 1024


def choose_inputs(given: Path | None, source: str, model: ModelState) -> list[TrialInput]:
    """The user's inputs; else photographs for whoever takes images, else what the model declares.

    Raises:
        TrialError: None is given, and the model neither declares nor shows what it takes.
    """
    if given is not None:
        return read_inputs(given)
    if source == "echo":
        body = bytes(_ECHO_BYTES)
        return [TrialInput(name="1 KiB", body=body, content_type="application/octet-stream")]
    if is_image(model.inputs):
        return _photographs()
    return made_up(model, _SEED, _NUM_MADE_UP)


def _photographs() -> list[TrialInput]:
    found = [
        each
        for each in files("inferpool.models.vision.photos").iterdir()
        if each.name.endswith(".jpg")
    ]
    return [
        TrialInput(name=each.name, body=each.read_bytes(), content_type="image/jpeg")
        for each in sorted(found, key=lambda each: each.name)
    ]
