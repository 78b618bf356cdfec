"""An archive of TorchServe's form whose handler does what requests say, as `FaultModel` does."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

_HANDLER = '''
"""A handler that is a class, without any of TorchServe's."""

import json
from pathlib import Path

from tests.fault_model import FaultModel


class Handler:
    def initialize(self, context):
        folder = Path(context.system_properties["model_dir"])
        options = json.loads((folder / "options.json").read_text())
        self.calls = options.get("calls")
        self.model = FaultModel(**options)

    def handle(self, data, context):
        asked = [row["body"] for row in data]
        for each in asked:
            if not isinstance(each, dict) or not isinstance(each.get("n"), int):
                raise ValueError('a request is {"n": number, "do": act}')
        if self.calls:
            with open(self.calls, "a") as file:
                file.write("".join(f"{each['n']}\\n" for each in asked))
        for each in asked:
            self.model._act(each.get("do", "ok"))
        return [{"twice": 2 * each["n"]} for each in asked]
'''


def make_fault_archive(
    path: Path, options: Mapping[str, object] | None = None, *, version: str = "1.0"
) -> Path:
    """Write an archive, named by its file, whose handler has these options of `FaultModel`."""
    model = {
        "modelName": path.stem,
        "modelVersion": version,
        "handler": "handler.py",
        "extraFiles": "options.json",
    }
    with zipfile.ZipFile(path, "w") as archive:
        manifest = {"runtime": "python", "model": model, "archiverVersion": "0.12.0"}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("handler.py", _HANDLER)
        archive.writestr("options.json", json.dumps(dict(options or {})))
    return path
