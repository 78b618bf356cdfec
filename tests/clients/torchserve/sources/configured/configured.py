"""A custom handler: a class of its own with `initialize` and `handle`, set by model-config.yaml."""

import json


class Configured:
    """Answers with the status, headers and type that a call asks for."""

    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        self.greeting = context.model_yaml_config["handler"]["greeting"]
        self.properties = context.system_properties
        self.initialized = True

    def handle(self, data, context):
        return [self._answer(row, context, place, len(data)) for place, row in enumerate(data)]

    def _answer(self, row, context, place, num_rows):
        asked = row.get("body") or row.get("data") or {}
        if isinstance(asked, bytes | bytearray):
            asked = json.loads(asked)
        if "status" in asked:
            context.set_response_status(asked["status"], asked.get("reason", ""), place)
        for name, value in asked.get("headers", {}).items():
            context.set_response_header(place, name, value)
        if "content_type" in asked:
            context.set_response_content_type(place, asked["content_type"])
        if "text" in asked:
            return asked["text"]
        return {
            "greeting": self.greeting,
            "rows": num_rows,
            "batch_size": self.properties.get("batch_size"),
            "name": context.model_name,
        }
