"""Names the protocols of calls that settings turn on. None of their code is imported."""

from collections.abc import Mapping

_TEI = "inferpool.service.parts.tei.calls"
_OF_TEI = (
    "embed", "embed_all", "embed_sparse", "similarity", "rerank", "predict", "tokenize", "decode"
)  # fmt: skip
_TORCHSERVE = "inferpool.service.parts.torchserve.calls"
CALLS_BY_SETTING = {
    "tei": {
        **{path: f"{_TEI}:{name}" for name in _OF_TEI for path in (f"/{name}", f"/tei/*/{name}")},
        "/predict": f"{_TEI}:SharedPredictProtocol",
        "/tei/*/any_task": f"{_TEI}:any_task",
    },
    "torchserve": {
        "/predictions/*": f"{_TORCHSERVE}:HandlerProtocol",
        "/models/*/invoke": f"{_TORCHSERVE}:HandlerProtocol",
        "/invocations": f"{_TORCHSERVE}:HandlerProtocol",
        "/*/predict": f"{_TORCHSERVE}:HandlerProtocol",
    },
    "sagemaker": {
        "/invocations": "inferpool.service.parts.platforms.sagemaker:InvocationProtocol",
        "/models/*/invoke": "inferpool.service.parts.platforms.sagemaker:InvocationProtocol",
    },
    "vertex_predict_route": {
        "": "inferpool.service.parts.platforms.vertex:VertexProtocol",
    },
}
"""Further ones, by the setting that turns them on; an empty path stands for the setting's value."""


def calls_of(settings: object) -> list[Mapping[str, str]]:
    """Return the tables of calls that settings turn on, of `CALLS_BY_SETTING`."""
    values = {name: getattr(settings, name) for name in CALLS_BY_SETTING}
    return [
        {path or values[name]: call for path, call in table.items()}
        for name, table in CALLS_BY_SETTING.items()
        if values[name]
    ]
