"""Makes the parts for platforms."""

from inferpool.service.service import Part
from inferpool.service.settings.settings import Settings


def parts_of_platforms(settings: Settings) -> list[Part]:
    """Make the parts that the settings ask for."""
    return [Part(name="platforms")]
