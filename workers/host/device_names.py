"""Parses the names of devices in settings."""

import re

FORMS = (
    '"auto", "cpu", "cuda", GPUs such as "cuda:0,1", UUIDs as `nvidia-smi -L` prints them '
    '("GPU-...", "MIG-..."), or several of these with commas between'
)
_ITEM = re.compile(r"cpu|cuda|cuda:\d+|(GPU|MIG)-[\w/-]+")
_INDEX = re.compile(r"\d+")


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the devices that a text names, one by one.

    Args:
        text: "auto" alone, or names with commas between. An index may follow a GPU's name:
            "cuda:0,1" means "cuda:0,cuda:1". The same device may be named twice.

    Returns:
        "auto", "cpu", "cuda" (every GPU), "cuda:N" with a GPU's index in NVML's order, or a UUID
        or the beginning of one.

    Raises:
        ValueError: The text is invalid.
    """
    if text == "auto":
        return (text,)
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if names and names[-1].startswith("cuda:") and _INDEX.fullmatch(part):
            names.append(f"cuda:{part}")
        elif _ITEM.fullmatch(part):
            names.append(part)
        else:
            raise ValueError(f"is not {FORMS}")
    return tuple(names)
