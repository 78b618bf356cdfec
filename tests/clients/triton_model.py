"""The models of these tests for Triton, which loads this file by its Python backend."""

import json

import numpy
import triton_python_backend_utils as backend


class TritonPythonModel:
    """One of the models of shapes.py, found by its name."""

    def initialize(self, args):
        self.name = args["model_name"]
        self.streams = self.name == "counts"
        config = json.loads(args["model_config"])
        self.order = [each["name"] for each in config["output"]]

    def execute(self, requests):
        if self.streams:
            for request in requests:
                self._stream(request)
            return None
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        tensors = {each.name(): each for each in request.inputs()}
        wanted = set(request.requested_output_names())
        try:
            outputs = compute(self.name, tensors)
        except ValueError as error:
            return backend.InferenceResponse(error=backend.TritonError(str(error)))
        found = {each.name(): each for each in outputs if each.name() in wanted}
        return backend.InferenceResponse([found[each] for each in self.order if each in found])

    def _stream(self, request):
        sender = request.get_response_sender()
        number = int(backend.get_input_tensor_by_name(request, "n").as_numpy().ravel()[0])
        for part in range(number):
            if number > 100 and part == 2:
                error = backend.TritonError("I was told to")
                sender.send(backend.InferenceResponse(error=error))
                break
            text = numpy.array([[f"[{part}]".encode()]], numpy.object_)
            tensor = backend.Tensor("output", text)
            sender.send(backend.InferenceResponse([tensor]))
        sender.send(flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def compute(name, tensors):
    """Return the outputs of a model that does not stream."""
    match name:
        case "add_sub":
            one, two = (tensors[each].as_numpy() for each in ("INPUT0", "INPUT1"))
            return [backend.Tensor("SUM", one + two), backend.Tensor("DIFFERENCE", one - two)]
        case "lengths":
            texts = tensors["input"].as_numpy()
            lengths = numpy.array([len(each) for each in texts.ravel()], numpy.int32)
            return [backend.Tensor("length", lengths.reshape(texts.shape))]
        case "fails":
            numbers = tensors["x"].as_numpy()
            if (numbers < 0).any():
                raise ValueError("I was told to")
            return [backend.Tensor("y", numbers)]
        case "scores" | "any_size" | "half_floats":
            return [backend.Tensor("y", tensors["x"].as_numpy())]
        case _:
            return [_same(name, each) for name, each in tensors.items()]


def _same(name, tensor):
    output = name.replace("IN_", "OUT_")
    if name == "IN_BF16":  # numpy has none, so it goes on as DLPack
        return backend.Tensor.from_dlpack(output, tensor.to_dlpack())
    return backend.Tensor(output, tensor.as_numpy())
