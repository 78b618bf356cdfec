"""Calls of kserve's clients: `python kserve_calls.py v1|v2|grpc ADDRESS`."""

import asyncio
import logging
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput
from telling import array, shown, tell

KIND, ADDRESS = sys.argv[1:3]
URL = f"http://{ADDRESS}"
ONES = np.arange(4, dtype=np.int32).reshape(1, 4)


def tensor(name, datatype, values, binary=True):
    made = InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def request(model, inputs, *, outputs=None, parameters=None, number="an id"):
    return InferRequest(
        model_name=model,
        infer_inputs=inputs,
        request_id=number,
        request_outputs=outputs,
        parameters=parameters,
    )


def pair(binary=True):
    return [
        tensor("INPUT0", "INT32", ONES, binary),
        tensor("INPUT1", "INT32", ONES + 1, binary),
    ]


def answer(found):
    if not hasattr(found, "outputs"):
        return found
    return {
        "model": [found.model_name, found.model_version],
        "id": found.id,
        "tensors": {each.name: array(each.as_numpy()) for each in found.outputs},
    }


async def call(name, made):
    try:
        tell(name, answer(await made))
    except Exception as error:
        tell(name, error=shown(error))


async def v1(client):
    row = {"INPUT0": [0, 1, 2, 3], "INPUT1": [1, 2, 3, 4]}
    await call("model ready", client.is_model_ready(URL, "scores"))
    await call("ready of no model", client.is_model_ready(URL, "nobody"))
    for name, model, body in (
        ("predict", "scores", {"instances": [[3, 1, 4, 1.5]]}),
        ("predict two", "scores", {"instances": [[3, 1, 4, 1.5], [1, 2, 3, 4]]}),
        ("predict by names", "add_sub", {"instances": [row, row]}),
        ("predict of no model", "nobody", {"instances": [[1]]}),
        ("no instances", "scores", {"rows": []}),
        ("instances are no list", "scores", {"instances": 7}),
        ("the model fails", "fails", {"instances": [[-1]]}),
    ):
        await call(name, client.infer(URL, body, model_name=model))


async def v2(client):
    await call("live", client.is_server_live(URL))
    await call("ready", client.is_server_ready(URL))
    await call("model ready", client.is_model_ready(URL, "add_sub"))
    await call("ready of no model", client.is_model_ready(URL, "nobody"))
    await infer(lambda made: client.infer(URL, made, model_name=made.model_name))
    json = request("add_sub", pair(binary=False))
    await call("infer as JSON", client.infer(URL, json, model_name="add_sub"))


async def grpc(client):
    await call("live", client.is_server_live())
    await call("ready", client.is_server_ready())
    await call("model ready", client.is_model_ready("add_sub"))
    await call("ready of no model", client.is_model_ready("nobody"))
    await infer(client.infer)


async def infer(send):
    await call("infer", send(request("add_sub", pair())))
    wanted = [RequestedOutput("SUM", {"binary_data": True})]
    await call("one output", send(request("add_sub", pair(), outputs=wanted)))
    binary = {"binary_data_output": True}
    await call("a binary answer", send(request("add_sub", pair(), parameters=binary)))
    half = tensor("x", "FP16", np.array([[0.5, 2]], np.float16))
    await call("FP16", send(request("half_floats", [half], parameters=binary)))
    texts = np.array([[b"abc"], [b""]], dtype=np.object_)
    await call("texts", send(request("lengths", [tensor("input", "BYTES", texts)])))
    await call("missing input", send(request("add_sub", pair()[:1])))
    await call("wrong shape", send(request("any_size", [tensor("x", "FP32", np.zeros(3, "f4"))])))
    await call("infer of no model", send(request("nobody", pair())))
    await call("the model fails", send(request("fails", [tensor("x", "INT32", -ONES[:, 3:])])))


async def main():
    logging.disable()
    if KIND == "grpc":
        async with InferenceGRPCClient(ADDRESS) as client:
            await grpc(client)
    else:
        async with InferenceRESTClient(RESTConfig(protocol=KIND)) as client:
            await (v1 if KIND == "v1" else v2)(client)


if __name__ == "__main__":
    asyncio.run(main())
