"""Messages and services of the `.proto` files in this folder, in a descriptor pool of their own.

Clients of the same protocols bring messages of the same names, and protobuf accepts each name only
once in a pool. So nothing here is in the default pool, and a process may use such a client and
serve. Any release of protobuf will do, since no code is generated from the files.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

INFERENCE = "inference"
HEALTH = "grpc.health.v1"
REFLECTION = "grpc.reflection.v1"
_FILES = {INFERENCE: "inference.proto", HEALTH: "health.proto", REFLECTION: "reflection.proto"}
_TOKEN = re.compile(r'//[^\n]*|"[^"]*"|[\w.]+|[{}()<>=,;]')
_SCALARS = {
    name: FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


class Method(NamedTuple):
    """A method of a service, with the classes of its messages."""

    name: str
    request: Any
    response: Any
    is_client_streaming: bool
    is_server_streaming: bool


class Schema:
    """All files of this folder, in one pool."""

    def __init__(self) -> None:
        """Read the files, and build the pool."""
        self.pool = DescriptorPool()
        self.services: list[str] = []
        """The full names of all services."""
        for package, name in _FILES.items():
            file = read_proto(f"{package.replace('.', '/')}/{name}", _text_of(name))
            self.pool.AddSerializedFile(file.SerializeToString())
            self.services += [f"{package}.{each.name}" for each in file.service]

    def message(self, package: str, name: str) -> Any:
        """Return the class of a message."""
        return GetMessageClass(self.pool.FindMessageTypeByName(f"{package}.{name}"))

    def methods(self, service: str) -> Iterator[Method]:
        """Yield the methods of a service, given its full name."""
        found = self.pool.FindServiceByName(service)
        proto = ServiceDescriptorProto()
        found.CopyToProto(proto)
        for each in proto.method:
            request, response = (
                GetMessageClass(self.pool.FindMessageTypeByName(name.lstrip(".")))
                for name in (each.input_type, each.output_type)
            )
            yield Method(each.name, request, response, each.client_streaming, each.server_streaming)


@cache
def schema() -> Schema:
    """Return the schema, which is built once in a process."""
    return Schema()


def read_proto(name: str, text: str) -> FileDescriptorProto:
    """Return the descriptor of a file of proto3: as much of that language as our files need.

    Args:
        name: The path that the file has in the pool.
        text: The file.
    """
    reader = _Reader(text)
    file = FileDescriptorProto(name=name)
    while reader.has_more:
        match reader.next():
            case "syntax":
                file.syntax = reader.until(";")[1].strip('"')
            case "package":
                file.package = reader.until(";")[0]
            case "message":
                reader.read_message(file.message_type.add())
            case "enum":
                reader.read_enum(file.enum_type.add())
            case "service":
                reader.read_service(file.service.add())
            case other:
                raise ValueError(f"{name}: {other!r} is not expected here")
    _Names(file).resolve()
    return file


class _Reader:
    """Reads declarations from the tokens of a file."""

    def __init__(self, text: str) -> None:
        found: list[str] = _TOKEN.findall(text)
        self._tokens = [each for each in found if not each.startswith("//")]
        self._place = 0

    @property
    def has_more(self) -> bool:
        """The file goes on."""
        return self._place < len(self._tokens)

    def next(self) -> str:
        """Return the next token."""
        self._place += 1
        return self._tokens[self._place - 1]

    def until(self, end: str) -> list[str]:
        """Return the tokens before an `end`, which is dropped."""
        start, place = self._place, self._tokens.index(end, self._place)
        self._place = place + 1
        return self._tokens[start:place]

    def read_message(self, message: DescriptorProto) -> None:
        """Read a message from its name on."""
        message.name = self.next()
        self.until("{")
        while (token := self.next()) != "}":
            if token == "message":
                self.read_message(message.nested_type.add())
            elif token == "enum":
                self.read_enum(message.enum_type.add())
            elif token == "oneof":
                message.oneof_decl.add().name = self.next()
                self.until("{")
                while (token := self.next()) != "}":
                    field = _add_field(message, [token, *self.until(";")])
                    field.oneof_index = len(message.oneof_decl) - 1
            else:
                _add_field(message, [token, *self.until(";")])

    def read_enum(self, enum: EnumDescriptorProto) -> None:
        """Read an enum from its name on."""
        enum.name = self.next()
        self.until("{")
        while (name := self.next()) != "}":
            enum.value.add(name=name, number=int(self.until(";")[1]))

    def read_service(self, service: ServiceDescriptorProto) -> None:
        """Read a service from its name on."""
        service.name = self.next()
        self.until("{")
        while self.next() != "}":
            method = service.method.add(name=self.next())
            request, response = self._message_of_method(), self._message_of_method()
            method.input_type, method.output_type = request[-1], response[-1]
            if len(request) > 1:
                method.client_streaming = True
            if len(response) > 1:
                method.server_streaming = True
            self.until(";")

    def _message_of_method(self) -> list[str]:
        self.until("(")
        return self.until(")")


def _add_field(message: DescriptorProto, tokens: Sequence[str]) -> FieldDescriptorProto:
    """Add a field, given its declaration without the semicolon."""
    *kind, name, _, number = tokens
    field = message.field.add(name=name, number=int(number))
    field.label = FieldDescriptorProto.LABEL_OPTIONAL
    if kind[0] == "map":  # `map<KEY, VALUE>` is a repeated message of the two
        entry = message.nested_type.add()
        entry.name = f"{name.title().replace('_', '')}Entry"
        entry.options.map_entry = True
        _add_field(entry, [kind[2], "key", "=", "1"])
        _add_field(entry, [kind[4], "value", "=", "2"])
        kind = ["repeated", entry.name]
    if kind[0] == "repeated":
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind[-1] in _SCALARS:
        field.type = _SCALARS[kind[-1]]
    else:
        field.type_name = kind[-1]
    return field


class _Names:
    """The messages and enums of a file, to replace names by whole ones."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._kinds: dict[str, int] = {}

    def resolve(self) -> None:
        """Give all fields and methods the whole names of their types."""
        package = f".{self._file.package}"
        self._collect(package, self._file.message_type, self._file.enum_type)
        for message in self._file.message_type:
            self._resolve_fields(package, message)
        for service in self._file.service:
            for method in service.method:
                method.input_type = f"{package}.{method.input_type}"
                method.output_type = f"{package}.{method.output_type}"

    def _collect(self, scope: str, messages: Any, enums: Any) -> None:
        for enum in enums:
            self._kinds[f"{scope}.{enum.name}"] = FieldDescriptorProto.TYPE_ENUM
        for message in messages:
            self._kinds[f"{scope}.{message.name}"] = FieldDescriptorProto.TYPE_MESSAGE
            self._collect(f"{scope}.{message.name}", message.nested_type, message.enum_type)

    def _resolve_fields(self, scope: str, message: DescriptorProto) -> None:
        scope = f"{scope}.{message.name}"
        for nested in message.nested_type:
            self._resolve_fields(scope, nested)
        for field in message.field:
            if not field.type_name:
                continue
            around = scope  # the nearest type of that name counts
            while f"{around}.{field.type_name}" not in self._kinds:
                around = around.rpartition(".")[0]
            field.type_name = f"{around}.{field.type_name}"
            field.type = self._kinds[field.type_name]


def _text_of(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
