"""Says what clients send to a model as JSON. Imports no torch, for programs that only ask."""

from inferpool.models.spec import Interface


def body_of(interface: Interface, instance: object) -> object:
    """Return the JSON body of a call with one instance, for a model with such an interface."""
    if interface.envelope:
        return {"instances": [instance]}
    if interface.accepts and isinstance(instance, dict) and instance.keys() == {"b64"}:
        return instance["b64"]
    return instance
