"""Calls of tritonclient to models with weights: `python real_models_calls.py http|grpc ADDRESS`.

The answers are compared with those of /predict, whose address is in the variable PREDICT.
"""

import json
import os
import sys
import urllib.request

import numpy as np
from telling import shown, tell

KIND, ADDRESS = sys.argv[1:3]
if KIND == "http":
    import tritonclient.http as library
else:
    import tritonclient.grpc as library
TEXTS = ["a cat on a chair", "ein Text"]


def predicted(model, body, content_type):
    """Return what /predict answers."""
    url = f"{os.environ['PREDICT']}/predict/{model}"
    request = urllib.request.Request(url, body, {"Content-Type": content_type})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["predictions"]


def elements(*values):
    array = np.array([[each] for each in values], dtype=np.object_)
    made = library.InferInput("input", list(array.shape), "BYTES")
    made.set_data_from_numpy(array)
    return [made]


def echo(client):
    given = library.InferInput("any", [2, 3], "FP32")
    given.set_data_from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
    found = client.infer("echo", [given]).as_numpy("any")
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]], found
    return "the same tensor"


def labels(client):
    with open(os.environ["PHOTO"], "rb") as file:
        photo = file.read()
    (expected,) = predicted("efficientnet_lite0", photo, "image/jpeg")
    (output,) = client.get_model_metadata("efficientnet_lite0", **AS_JSON)["outputs"]
    wanted = library.InferRequestedOutput(output["name"], class_count=5)
    result = client.infer("efficientnet_lite0", elements(photo), outputs=[wanted])
    classes = [each.decode().split(":") for each in result.as_numpy(output["name"])[0]]
    names = [":".join(label) for _, _, *label in classes]
    assert names == [each["label"] for each in expected], (names, expected)
    return names


def vectors(client):
    body = json.dumps({"instances": TEXTS}).encode()
    expected = np.array(predicted("minilm_l6", body, "application/json"))
    (output,) = client.get_model_metadata("minilm_l6", **AS_JSON)["outputs"]
    result = client.infer("minilm_l6", elements(*(each.encode() for each in TEXTS)))
    found = result.as_numpy(output["name"])
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.allclose(found, expected, atol=1e-5)
    return list(found.shape)


AS_JSON = {"as_json": True} if KIND == "grpc" else {}


def main():
    client = library.InferenceServerClient(ADDRESS)
    for name, function in (("echo", echo), ("a photograph", labels), ("vectors", vectors)):
        try:
            tell(name, function(client))
        except Exception as error:
            tell(name, error=shown(error))
    client.close()


if __name__ == "__main__":
    main()
