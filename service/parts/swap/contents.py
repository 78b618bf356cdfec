"""Compares the contents that two versions of a model answer with, such as pictures.

Pictures of two good versions rarely have the same bytes: one number that is rounded otherwise
changes a pixel, and an encoder of another release changes them all a little. So pictures are
compared as they look, and all other contents by their bytes. In threads of the main process, and
only where a model answers with content.
"""

import io
import logging
import warnings

import numpy as np
from PIL import Image

from inferpool.models.content import bare_type
from inferpool.models.spec import MAX_IMAGE_PIXELS
from inferpool.service.api.codecs.contents import is_raster
from inferpool.workers.shared.messages import ContentBlob

logger = logging.getLogger(__name__)

_MOST_CHANGED = 0.01
"""Share of the pixels that may differ between two pictures that look alike."""
_LEAST_CHANGE = 16
"""Difference of a pixel's value, of 255, from which on it counts."""


def are_alike(before: ContentBlob, after: ContentBlob) -> bool:
    """Return whether two contents say the same.

    They must be of one media type. Pictures must have the same size, and may differ by little in
    all pixels, and by more in one of a hundred; the bytes of other contents must be the same.
    """
    if bare_type(before.media_type) != bare_type(after.media_type):
        return False
    if before.buffer == after.buffer:
        return True
    if not is_raster(before.media_type):
        return False
    one, two = _pixels_of(before), _pixels_of(after)
    if one is None or two is None or one.shape != two.shape:
        return False
    changed = (np.abs(one.astype(np.int16) - two.astype(np.int16)) >= _LEAST_CHANGE).any(axis=-1)
    return float(changed.mean()) <= _MOST_CHANGED


def _pixels_of(blob: ContentBlob) -> np.ndarray | None:
    """Decode a picture to red, green, blue and opacity; None if it cannot be decoded."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about large pictures
            picture = Image.open(io.BytesIO(blob.buffer))
            if picture.width * picture.height > MAX_IMAGE_PIXELS:
                return None
            return np.asarray(picture.convert("RGBA"))
    except Exception:  # Pillow raises errors of all kinds
        logger.debug("a picture that a model rendered cannot be decoded", exc_info=True)
        return None
