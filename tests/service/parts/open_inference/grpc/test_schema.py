import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import Default

from inferpool.service.parts.open_inference.grpc import schema as module
from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, read_proto, schema

FOLDER = Path(module.__file__).parent
BOTH_ORDERS = """
import sys
from pathlib import Path
from google.protobuf import descriptor_pool, message_factory
from inferpool.service.parts.open_inference.grpc.schema import INFERENCE, read_proto, schema


def register():  # as the code of tritonclient and kserve does when it is imported
    text = Path({folder!r}, "inference.proto").read_text()
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(read_proto("grpc_service.proto", text).SerializeToString())
    found = pool.FindMessageTypeByName("inference.ModelInferRequest")
    return message_factory.GetMessageClass(found)(model_name="echo")


theirs = register() if sys.argv[1] == "before" else None
ours = schema().message(INFERENCE, "ModelInferRequest")(model_name="echo")
theirs = theirs or register()
assert type(ours) is not type(theirs)
assert type(ours).FromString(theirs.SerializeToString()) == ours
"""


@pytest.mark.parametrize("name", ["inference.proto", "health.proto", "reflection.proto"])
def test_files_are_read_as_the_compiler_of_protobuf_reads_them(name: str, tmp_path: Path):
    out = tmp_path / "set"
    flags = (f"--proto_path={FOLDER}", f"--descriptor_set_out={out}", name)
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags], check=True, timeout=60)
    (compiled,) = FileDescriptorSet.FromString(out.read_bytes()).file
    ours = read_proto(name, (FOLDER / name).read_text())
    assert without_json_names(compiled) == without_json_names(ours)


def without_json_names(file: FileDescriptorProto) -> FileDescriptorProto:
    """Drop what the compiler adds and every release of protobuf derives by itself."""
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_other_declarations_are_refused():
    with pytest.raises(ValueError, match="'option' is not expected here"):
        read_proto("x.proto", 'syntax = "proto3"; option a = b;')


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_of_the_protocol_may_be_in_the_same_process(when: str):
    code = BOTH_ORDERS.format(folder=str(FOLDER))
    subprocess.run([sys.executable, "-c", code, when], check=True, timeout=60)


def test_nothing_is_in_the_default_pool():
    schema().message(INFERENCE, "ModelInferRequest")
    for name in ("inference.ModelInferRequest", "grpc.health.v1.HealthCheckRequest"):
        with pytest.raises(KeyError):
            Default().FindMessageTypeByName(name)
