"""Calls of tritonclient's asyncio clients: `python tritonclient_aio_calls.py http|grpc ADDRESS`."""

import asyncio
import sys

import numpy as np
from telling import array, plain, shown, tell

KIND, ADDRESS = sys.argv[1:3]
if KIND == "http":
    import tritonclient.http.aio as library
else:
    import tritonclient.grpc.aio as library
ONES = np.arange(4, dtype=np.int32).reshape(1, 4)


def tensor(name, datatype, values):
    made = library.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


def pair():
    return [tensor("INPUT0", "INT32", ONES), tensor("INPUT1", "INT32", ONES + 1)]


def answer(result):
    response = plain(result.get_response())
    names = [each["name"] for each in response.get("outputs", [])]
    return {
        "model": [response["model_name"], response.get("model_version")],
        "id": response.get("id"),
        "tensors": {name: array(result.as_numpy(name)) for name in names},
    }


async def call(name, made):
    try:
        found = await made
        tell(name, answer(found) if hasattr(found, "as_numpy") else plain(found))
    except Exception as error:
        tell(name, error=shown(error))


async def streams(client):
    def request(model, inputs, number):
        return {"model_name": model, "inputs": inputs, "request_id": number}

    async def requests():
        yield request("add_sub", pair(), "one")
        await asyncio.sleep(0.3)  # Triton answers those of one stream in any order
        yield request("nobody", pair(), "two")
        await asyncio.sleep(0.3)
        yield request("counts", [tensor("n", "INT32", np.array([[2]], np.int32))], "three")
        await asyncio.sleep(0.3)
        yield request("add_sub", pair(), "four")

    found = []
    async for result, error in client.stream_infer(requests()):
        found.append(answer(result) if error is None else {"error": shown(error)})
    tell("stream", found)


async def main():
    async with library.InferenceServerClient(ADDRESS) as client:
        await call("live", client.is_server_live())
        await call("ready", client.is_server_ready())
        await call("server metadata", client.get_server_metadata())
        await call("model ready", client.is_model_ready("add_sub"))
        await call("ready of no model", client.is_model_ready("nobody"))
        await call("metadata", client.get_model_metadata("add_sub"))
        await call("config", client.get_model_config("add_sub"))
        await call("index", client.get_model_repository_index())
        await call("infer", client.infer("add_sub", pair(), request_id="an id"))
        await call("infer of no model", client.infer("nobody", pair()))
        await call("missing input", client.infer("add_sub", pair()[:1]))
        texts = np.array([[b"abc"]], dtype=np.object_)
        await call("texts", client.infer("lengths", [tensor("input", "BYTES", texts)]))
        classes = library.InferRequestedOutput("y", class_count=2)
        x = tensor("x", "FP32", np.array([[3, 1, 4, 1.5]], np.float32))
        await call("classes", client.infer("scores", [x], outputs=[classes]))
        many = await asyncio.gather(*(client.infer("add_sub", pair()) for _ in range(20)))
        tell("twenty at once", [answer(each) for each in many])
        await call("statistics", client.get_inference_statistics("add_sub"))
        if KIND == "grpc":
            await streams(client)


if __name__ == "__main__":
    asyncio.run(main())
