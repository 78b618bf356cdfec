"""A proxy for gRPC that writes down what passes: `python grpc_recorder.py ADDRESS FILE`.

It prints its port, and works until its input ends. The package is tritonclient's, for its messages.
"""

import base64
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2

ADDRESS, FILE = sys.argv[1:3]
NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def same(message):
    return message


class CallRecorder(grpc.GenericRpcHandler):
    def __init__(self, channel, file):
        self.channel, self.file = channel, file

    def service(self, details):
        method = details.method
        call = dict(details.invocation_metadata).get("x-call", method.rpartition("/")[2])
        if method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, context: self.stream(call, method, requests, context)
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self.unary(call, method, request, context)
        )

    def unary(self, call, method, request, context):
        line = {"call": call, "method": method, "requests": [coded(request)]}
        kind = getattr(service_pb2, f"{method.rpartition('/')[2]}Response")
        try:
            answer = self.channel.unary_unary(method, same, same)(request, timeout=60)
            line |= {"status": "OK", "answers": [shown(kind, answer)]}
        except grpc.RpcError as error:
            self.write(line | {"status": error.code().name, "details": error.details()})
            context.abort(error.code(), error.details())
        self.write(line)
        return answer

    def stream(self, call, method, requests, context):
        sent, answers = [], []

        def passed():
            for request in requests:
                sent.append(coded(request))
                yield request

        kind = service_pb2.ModelStreamInferResponse
        for answer in self.channel.stream_stream(method, same, same)(passed()):
            answers.append(shown(kind, answer))
            yield answer
        self.write(
            {"call": call, "method": method, "requests": sent, "status": "OK", "answers": answers}
        )

    def write(self, line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def coded(message):
    return base64.b64encode(message).decode()


def shown(kind, message):
    return MessageToDict(kind.FromString(message), preserving_proto_field_name=True)


def main():
    with open(FILE, "w") as file:
        channel = grpc.insecure_channel(ADDRESS, options=NO_LIMIT)
        server = grpc.server(ThreadPoolExecutor(8), options=NO_LIMIT)
        server.add_generic_rpc_handlers([CallRecorder(channel, file)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        sys.stdin.read()
        server.stop(5).wait()


if __name__ == "__main__":
    main()
