"""A classifier whose device decodes JPEGs, and fails as comments in these say."""

from collections.abc import Sequence
from io import BytesIO

import torch
from PIL import Image

from inferpool.models.item import Features, Item
from tests.models.items import photo
from tests.small_classifier import SmallClassifier

LOSE = "lose the device"
FILL = "leave no memory for more than two"


def marked(text: str, image: Image.Image) -> bytes:
    """Return a JPEG with a comment."""
    buffer = BytesIO()
    image.save(buffer, "JPEG", comment=text)
    return buffer.getvalue()


class DeviceJpegs(SmallClassifier):
    """Decodes on the device, whatever is faster. For the simulated accelerator."""

    fast_decodings = ("device",)

    def encoded_samples(self) -> Sequence[Item]:
        """Return one photograph."""
        return [Item(kind="image", payload=memoryview(marked("", photo("coffee"))))]

    def collate(self, instances: Sequence[Features]) -> Features:
        """Let the device fail as a JPEG asks for."""
        texts = b"".join(each["image"].numpy().tobytes() for each in instances)
        if LOSE.encode() in texts:
            torch.sim.fault_after(0)
        if FILL.encode() in texts and len(instances) > 2:
            torch.sim.out_of_memory_after(0)
        return super().collate(instances)
