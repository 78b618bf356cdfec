"""Calls of tritonclient, sync: `python tritonclient_calls.py http|grpc ADDRESS`."""

import sys
import threading
import time

import ml_dtypes
import numpy as np
from telling import KEY, array, named, plain, shown, tell

KIND, ADDRESS = sys.argv[1:3]
if KIND == "http":
    import tritonclient.http as library
else:
    import tritonclient.grpc as library
DTYPES = {
    "BOOL": np.bool_,
    **{f"{sign}INT{n}": f"{sign.lower()}int{n}" for sign in ("", "U") for n in (8, 16, 32, 64)},
    "FP32": np.float32,
    "FP64": np.float64,
}


def tensor(name, datatype, values, **options):
    values = np.asarray(values)
    made = library.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, **options)
    return made


def wanted(name, *, json=False, classes=0):
    options = {"binary_data": not json} if KIND == "http" else {}
    return library.InferRequestedOutput(name, class_count=classes, **options)


def answer(result):
    response = plain(result.get_response())
    names = [each["name"] for each in response.get("outputs", [])]
    return {
        "model": [response["model_name"], response.get("model_version")],
        "id": response.get("id"),
        "outputs": {
            each["name"]: [each["datatype"], list(map(int, each.get("shape", [])))]
            for each in response.get("outputs", [])
        },
        "tensors": {name: array(result.as_numpy(name)) for name in names},
    }


def call(name, function, *arguments, **options):
    if headers := named(name) | options.pop("headers", {}):
        options["headers"] = headers
    try:
        found = function(*arguments, **options)
        tell(name, answer(found) if hasattr(found, "as_numpy") else plain(found))
    except Exception as error:
        tell(name, error=shown(error))


def metadata(client):
    call("live", client.is_server_live)
    call("ready", client.is_server_ready)
    call("server metadata", client.get_server_metadata)
    for model in ("add_sub", "types", "halves", "scores", "any_size", "lengths", "counts"):
        call(f"metadata {model}", client.get_model_metadata, model)
        call(f"config {model}", client.get_model_config, model)
        call(f"model ready {model}", client.is_model_ready, model)
    call("metadata of version 1", client.get_model_metadata, "add_sub", "1")
    call("config of version 1", client.get_model_config, "add_sub", "1")
    call("metadata of no version", client.get_model_metadata, "add_sub", "77")
    call("metadata of a version that is no number", client.get_model_metadata, "add_sub", "x")
    call("metadata of no model", client.get_model_metadata, "nobody")
    call("ready of no model", client.is_model_ready, "nobody")
    call("ready of no version", client.is_model_ready, "add_sub", "77")
    call("config of no model", client.get_model_config, "nobody")
    call("statistics", client.get_inference_statistics)
    call("statistics of add_sub", client.get_inference_statistics, "add_sub")
    call("statistics of version 1", client.get_inference_statistics, "add_sub", "1")
    call("statistics of no model", client.get_inference_statistics, "nobody")
    call("index", client.get_model_repository_index)


def infer(client):
    ones = np.arange(4, dtype=np.int32).reshape(1, 4)
    pair = [tensor("INPUT0", "INT32", ones), tensor("INPUT1", "INT32", ones + 1)]
    two = np.concatenate([ones, ones])
    batch = [tensor("INPUT0", "INT32", two), tensor("INPUT1", "INT32", two * 3)]
    call("infer", client.infer, "add_sub", pair, request_id="an id")
    call("infer of version 1", client.infer, "add_sub", pair, model_version="1")
    call("infer of a batch", client.infer, "add_sub", batch)
    call("one output", client.infer, "add_sub", pair, outputs=[wanted("SUM")])
    call(
        "outputs in their order",
        client.infer,
        "add_sub",
        pair,
        outputs=[wanted("DIFFERENCE"), wanted("SUM")],
    )
    call("no such output", client.infer, "add_sub", pair, outputs=[wanted("QUOTIENT")])
    call("infer of no model", client.infer, "nobody", pair)
    call("infer of no version", client.infer, "add_sub", pair, model_version="77")
    call("missing input", client.infer, "add_sub", pair[:1])
    call("input twice", client.infer, "add_sub", [pair[0], pair[0]])
    call("no such input", client.infer, "add_sub", [*pair, tensor("x", "INT32", ones)])
    call(
        "wrong datatype",
        client.infer,
        "add_sub",
        [tensor("INPUT0", "FP32", ones.astype(np.float32)), pair[1]],
    )
    call("wrong shape", client.infer, "add_sub", [tensor("INPUT0", "INT32", ones[:, :3]), pair[1]])
    call("wrong rank", client.infer, "add_sub", [tensor("INPUT0", "INT32", ones[0]), pair[1]])
    call("batches that differ", client.infer, "add_sub", [batch[0], pair[1]])
    call("priority", client.infer, "add_sub", pair, priority=1)
    call("timeout", client.infer, "add_sub", pair, timeout=9_000_000)
    call(
        "parameters",
        client.infer,
        "any_size",
        [tensor("x", "FP32", ones.astype(np.float32))],
        parameters={"unknown": "one", "number": 2, "truth": True},
    )
    call("sequence", client.infer, "add_sub", pair, sequence_id=7, sequence_start=True)
    call("the model fails", client.infer, "fails", [tensor("x", "INT32", -ones[:, 3:])])
    call("the model does not fail", client.infer, "fails", [tensor("x", "INT32", ones[:, 3:])])
    call(
        "a stream's model without a stream",
        client.infer,
        "counts",
        [tensor("n", "INT32", ones[:, 3:])],
    )


def datatypes(client):
    values = [tensor(f"IN_{t}", t, np.array([[0, 1]]).astype(d)) for t, d in DTYPES.items()]
    call("all datatypes", client.infer, "types", values)
    halves = np.array([[0.5, -2]])
    both = [
        tensor("IN_FP16", "FP16", halves.astype(np.float16)),
        tensor("IN_BF16", "BF16", halves.astype(ml_dtypes.bfloat16)),
    ]
    call("halves", client.infer, "halves", both)
    texts = np.array([[b""], [b"a"], ["\u00e9\u00e9".encode()], [b"x" * 300]], dtype=np.object_)
    call("texts", client.infer, "lengths", [tensor("input", "BYTES", texts)])
    call(
        "empty tensor",
        client.infer,
        "any_size",
        [tensor("x", "FP32", np.zeros((1, 0), np.float32))],
    )
    call(
        "empty batch", client.infer, "any_size", [tensor("x", "FP32", np.zeros((0, 2), np.float32))]
    )
    if KIND == "http":
        json = [
            tensor(f"IN_{t}", t, np.array([[0, 1]]).astype(d), binary_data=False)
            for t, d in DTYPES.items()
        ]
        call(
            "all datatypes as JSON",
            client.infer,
            "types",
            json,
            outputs=[wanted(f"OUT_{t}", json=True) for t in DTYPES],
        )
        call(
            "JSON and binary",
            client.infer,
            "types",
            [*json[:4], *values[4:]],
            outputs=[wanted(f"OUT_{t}", json=t < "I") for t in DTYPES],
        )
        call(
            "texts as JSON",
            client.infer,
            "lengths",
            [tensor("input", "BYTES", texts, binary_data=False)],
        )
        call(
            "halves, the answer as JSON",
            client.infer,
            "halves",
            both,
            outputs=[wanted("OUT_FP16", json=True)],
        )


def classification(client):
    scores = np.array([[0.1, 0.9, 0.3, 0.2], [4, 1, 2, 3]], np.float32)
    x = [tensor("x", "FP32", scores)]
    call("classes with labels", client.infer, "scores", x, outputs=[wanted("y", classes=2)])
    call("more classes than there are", client.infer, "scores", x, outputs=[wanted("y", classes=9)])
    call("classes without labels", client.infer, "any_size", x, outputs=[wanted("y", classes=2)])
    if KIND == "http":
        call(
            "classes as JSON",
            client.infer,
            "scores",
            x,
            outputs=[wanted("y", classes=2, json=True)],
        )


def encodings(client):
    ones = np.arange(4, dtype=np.int32).reshape(1, 4)
    pair = [tensor("INPUT0", "INT32", ones), tensor("INPUT1", "INT32", ones + 1)]
    for name in ("gzip", "deflate"):
        if KIND == "http":
            call(
                f"{name} request", client.infer, "add_sub", pair, request_compression_algorithm=name
            )
            call(
                f"{name} answer", client.infer, "add_sub", pair, response_compression_algorithm=name
            )
            call(
                f"{name} both",
                client.infer,
                "add_sub",
                pair,
                request_compression_algorithm=name,
                response_compression_algorithm=name,
            )
        else:
            call(f"{name}", client.infer, "add_sub", pair, compression_algorithm=name)


def asynchronous(client):
    ones = np.arange(4, dtype=np.int32).reshape(1, 4)
    pair = [tensor("INPUT0", "INT32", ones), tensor("INPUT1", "INT32", ones + 1)]
    if KIND == "http":
        call(
            "async_infer",
            lambda **options: client.async_infer("add_sub", pair, **options).get_result(),
        )
        return
    done, found = threading.Event(), []

    def callback(result, error):
        found.append((result, error))
        done.set()

    def wait(**options):
        client.async_infer("add_sub", pair, callback, **options)
        assert done.wait(30)
        ((result, error),) = found
        if error is not None:
            raise error
        return result

    call("async_infer", wait)


def streams(client):
    """Requests of one stream: good, bad, of a model that streams, good again."""
    ones = np.arange(4, dtype=np.int32).reshape(1, 4)
    pair = [tensor("INPUT0", "INT32", ones), tensor("INPUT1", "INT32", ones + 1)]
    found, wake = [], threading.Condition()

    def callback(result, error):
        with wake:
            found.append(answer(result) if error is None else {"error": shown(error)})
            if error is None:
                response = plain(result.get_response())
                found[-1]["final"] = (
                    response.get("parameters", {})
                    .get("triton_final_response", {})
                    .get("bool_param")
                )
            wake.notify()

    def take(number):
        with wake:
            assert wake.wait_for(lambda: len(found) >= number, 30), found
            taken, found[:] = found[:number], found[number:]
        return taken

    def send(name, number, model, inputs, **options):
        try:
            client.async_stream_infer(model, inputs, **options)
            tell(name, take(number))
        except Exception as error:
            tell(name, error=shown(error))

    def n(number):
        return [tensor("n", "INT32", np.array([[number]], np.int32))]

    client.start_stream(callback, headers=named("a stream"))
    send("stream: infer", 1, "add_sub", pair, request_id="one")
    send("stream: no model", 1, "nobody", pair, request_id="two")
    send(
        "stream: wrong shape",
        1,
        "add_sub",
        [tensor("INPUT0", "INT32", ones[:, :3]), pair[1]],
        request_id="three",
    )
    send("stream: the model fails", 1, "fails", [tensor("x", "INT32", -ones[:, 3:])])
    send("stream: infer after errors", 1, "add_sub", pair, request_id="four")
    send("stream: three parts", 3, "counts", n(3), request_id="five")
    send(
        "stream: parts and the final response",
        4,
        "counts",
        n(3),
        enable_empty_final_response=True,
        request_id="six",
    )
    send("stream: parts, then an error", 3, "counts", n(101))
    send("stream: infer last", 1, "add_sub", pair, enable_empty_final_response=True)
    client.stop_stream()


def administration(client):
    call("load", client.load_model, "add_sub")
    call("unload of no model", client.unload_model, "nobody")
    call("load of no model", client.load_model, "nobody")
    admin = {"x-api-key": KEY}
    x = [tensor("x", "FP16", np.array([[0.5, 2]], np.float16))]
    call("unload by the key", client.unload_model, "half_floats", headers=admin)
    until(lambda: not client.is_model_ready("half_floats"))
    call("ready after unload", client.is_model_ready, "half_floats")
    call("infer after unload", client.infer, "half_floats", x)
    call("index after unload", client.get_model_repository_index)
    call("load by the key", client.load_model, "half_floats", headers=admin)
    until(lambda: client.is_model_ready("half_floats"))
    call("infer after load", client.infer, "half_floats", x)
    call("unload of no model by the key", client.unload_model, "nobody", headers=admin)
    call("load of no model by the key", client.load_model, "nobody", headers=admin)
    call("system shared memory status", client.get_system_shared_memory_status)
    call(
        "register system shared memory",
        client.register_system_shared_memory,
        "region",
        "/no_such_region",
        64,
    )
    call("unregister system shared memory", client.unregister_system_shared_memory)
    call("cuda shared memory status", client.get_cuda_shared_memory_status)
    call(
        "register cuda shared memory", client.register_cuda_shared_memory, "region", b"AAAA", 0, 64
    )
    call("trace settings", client.get_trace_settings)
    call("update trace settings", client.update_trace_settings, settings={"trace_rate": "5"})
    call("log settings", client.get_log_settings)
    call("update log settings", client.update_log_settings, {"log_verbose_level": 0})
    shared = library.InferInput("INPUT0", [1, 4], "INT32")
    shared.set_shared_memory("region", 16)
    other = tensor("INPUT1", "INT32", np.zeros((1, 4), np.int32))
    call("an input in shared memory", client.infer, "add_sub", [shared, other])
    output = wanted("SUM")
    output.set_shared_memory("region", 16)
    zeros = tensor("INPUT0", "INT32", np.zeros((1, 4), np.int32))
    call("an output in shared memory", client.infer, "add_sub", [zeros, other], outputs=[output])


def until(is_so):
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.1)


def main():
    client = library.InferenceServerClient(ADDRESS)
    for step in (infer, metadata, datatypes, classification, encodings, asynchronous):
        step(client)
    if KIND == "grpc":
        streams(client)
    administration(client)
    client.close()


if __name__ == "__main__":
    main()
