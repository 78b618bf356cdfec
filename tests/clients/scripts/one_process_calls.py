"""Serves and calls in one process: `python one_process_calls.py tritonclient|kserve FOLDER`.

It runs in the environment of the service, and imports the client's packages from the folder, after
ours. Both sides have messages of the same names.
"""

import asyncio
import socket
import sys

import inferpool

CLIENT, FOLDER = sys.argv[1:3]
sys.path.append(FOLDER)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def by_tritonclient(address):
    import numpy as np
    import tritonclient.grpc as library

    given = library.InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.ones((1, 2), np.float32))
    return library.InferenceServerClient(address).infer("echo", [given]).as_numpy("x").tolist()


async def by_kserve(address):
    import numpy as np
    from kserve import InferenceGRPCClient, InferInput, InferRequest

    given = InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.ones((1, 2), np.float32))
    async with InferenceGRPCClient(address) as client:
        answer = await client.infer(InferRequest(model_name="echo", infer_inputs=[given]))
        return answer.outputs[0].as_numpy().tolist()


def main():
    from telling import shown, tell

    port = free_port()
    address = f"127.0.0.1:{port}"
    with inferpool.serve("echo", port=0, grpc_port=port, replicas=1, front_ends=1):
        try:
            found = by_tritonclient(address) if CLIENT == "tritonclient" else None
            tell(f"{CLIENT} in one process", found or asyncio.run(by_kserve(address)))
        except Exception as error:
            tell(f"{CLIENT} in one process", error=shown(error))


if __name__ == "__main__":
    main()
