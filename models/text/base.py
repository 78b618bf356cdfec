"""The base of models of texts: reads instances, tokenizes, pads. Runs in worker processes only.

Axes: B batch, T tokens.
"""

# ruff: noqa: N806 - tensors carry their axes in their names

import math
from collections.abc import Collection, Hashable, Sequence
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from inferpool.models.base import Model
from inferpool.models.errors import Answered, InputError, ModelError
from inferpool.models.inputs import json_array, json_place, json_string, json_texts
from inferpool.models.item import Features, Item
from inferpool.models.json_errors import JsonErrors
from inferpool.models.spec import Placement
from inferpool.models.text.folder import TextFolder
from inferpool.models.text.network import TextNetwork
from inferpool.models.text.options import TextOptions, options_of
from inferpool.models.text.prose import PROSE, excerpts
from inferpool.models.text.tokenizer import Tokenizer, Tokens

Instance: TypeAlias = tuple[str, ...] | list[int]
"""A text, a pair of texts, or ids of tokens."""
_EXAMPLE = (2, 32)
"""Texts and tokens of the batch that measures the parts of a split network."""
_SHORTEST_BUCKET = 16
"""Tokens of the smallest bucket: shorter texts cost about the same, to read the weights."""
_MOST_USUAL = 8192
"""Most tokens of a text unless the settings say more: folders of decoders say 32,768 and more, and
a worker computes a text of the greatest length before it is ready."""
_MOST_TOKENIZED = 1 << 18
"""Characters of a text whose tokens a client may ask for: each may be one, and 70 bytes of JSON."""
_PADDED = ("ids", "types")


class TextModel(Model):
    """Base of encoders, rerankers and classifiers of texts.

    Subclasses set `known_parameters` and `forms`, and define `forward` and `render_batch`.

    Args:
        folder: Files of the model.
        network: Network of the folder.
        max_tokens: Most tokens of a text; None for what the folder says, up to 8,192.

    Raises:
        ModelError: The network has not room for so many tokens.
    """

    known_parameters: Collection[str] = ()
    """Names of the parameters that calls may have; see `models.text.options`."""
    forms: Sequence[tuple[str, ...]] = (("text",), ("ids",))
    """Names of the fields that an instance may have, each of these sets. If the first has one name,
    a JSON string and bytes in UTF-8 are instances, too."""

    def __init__(
        self, folder: TextFolder, network: TextNetwork, *, max_tokens: int | None = None
    ) -> None:
        if max_tokens is not None and not 3 <= max_tokens <= network.max_tokens:
            raise ModelError(f"max_tokens must be from 3 to {network.max_tokens}, not {max_tokens}")
        self._folder = folder
        self._source = network
        usual = min(folder.max_tokens or network.usual_max_tokens, _MOST_USUAL)
        self.max_tokens = min(max_tokens or usual, network.max_tokens)

    _packs = False
    """The network computes no padding."""

    def load(self, placement: Placement) -> None:
        """Read the weights and the tokenizer.

        Raises:
            ModelError: They are missing or cannot be read.
        """
        self.device = torch.device(placement.devices[0])
        source = self._source
        ids = torch.arange(math.prod(_EXAMPLE)) % source.vocab_size
        ids_BT = ids.view(_EXAMPLE)
        types = (torch.zeros_like(ids_BT),) if source.takes_types else ()
        self.network = self.load_network(
            source.build,
            source.weights,
            placement,
            example=(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), *types),
        )
        if isinstance(self.network, nn.Module) and self.device.type == "cpu":
            packing = [module for module in self.network.modules() if hasattr(module, "packs")]
            for module in packing:
                setattr(module, "packs", True)  # noqa: B010 - unknown to `nn.Module`
            self._packs = bool(packing)
        self.tokenizer = Tokenizer(
            self._folder.tokenizer, max_tokens=self.max_tokens, vocab_size=source.vocab_size
        )

    def preprocess(self, item: Item) -> Features:
        """Turn a text into int64 [T], without padding; see `features_of_tokens`.

        Raises:
            Answered: The tokenizer alone answers.
        """
        options = options_of(item.parameters, self.known_parameters)
        instance = self._instance(item, options)
        if options.tokenizer:
            raise Answered(self._by_tokenizer(instance, options))
        tokens = self._tokens(instance, options)
        if not tokens.ids:
            raise InputError("the text has no tokens: this model cannot compute an empty text")
        return self.features_of_tokens(tokens, instance, options)

    def features_of_tokens(
        self, tokens: Tokens, instance: Instance, options: TextOptions
    ) -> Features:
        """Return `ids`, and `types` if the network takes them; int64 [T]."""
        features = {"ids": torch.tensor(tokens.ids)}
        if self._source.takes_types:
            features["types"] = torch.tensor(tokens.types or [0] * len(tokens.ids))
        return features

    def prompted(self, text: str, options: TextOptions) -> str:
        """Return a text with what the model begins it with; as it is by default."""
        return text

    def bucket(self, features: Features) -> Hashable:
        """Group texts of about the same length, or all if the network needs no padding."""
        return None if self._packs else bucket_of(len(features["ids"]))

    def num_tokens(self, features: Features) -> int:
        """Count the tokens of a text, with the most padding that its group may give it."""
        num = len(features["ids"])
        return num if self._packs else bucket_of(num)

    def collate(self, instances: Sequence[Features]) -> Features:
        """Pad to the longest: int64 [B, T], and `mask`, bool, True where there are tokens.

        What is no row of tokens is stacked.
        """
        batch: dict[str, Tensor] = {}
        for name in instances[0]:
            rows = [each[name] for each in instances]
            if name not in _PADDED:
                batch[name] = torch.stack(rows)
                continue
            padding = self._source.pad_id if name == "ids" else 0
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=padding)
        lengths_B1 = torch.tensor([[len(each["ids"])] for each in instances])
        batch["mask"] = torch.arange(batch["ids"].shape[1]) < lengths_B1
        return batch

    def computed(self, batch: Features) -> tuple[Tensor, Tensor]:
        """Return what the network makes of a batch, and the mask on the device."""
        assert self.network is not None
        names = [name for name in ("ids", "mask", "types") if name in batch]
        given = [batch[name].to(self.device, non_blocking=True) for name in names]
        found = self.network(*given)
        assert isinstance(found, Tensor)
        return found, given[1]

    def instance_to_try(self, text: str) -> object:
        """Return the JSON of an instance with a text, for `warmup` and `samples`."""
        return text if len(self.forms[0]) == 1 else dict.fromkeys(self.forms[0], text)

    def warmup(self) -> Sequence[Item]:
        """Return a short text, and one of the greatest length."""
        long = " ".join([PROSE] * (1 + self.max_tokens // len(PROSE.split())))
        return [self._item(text) for text in ("How do I get there?", long)]

    def samples(self) -> Sequence[Item]:
        """Return prose of all lengths."""
        return [self._item(text) for text in excerpts()]

    def _item(self, text: str) -> Item:
        value = self.instance_to_try(text)
        return Item(kind="json", payload=memoryview(msgspec.json.encode(value)))

    def _instance(self, item: Item, options: TextOptions) -> Instance:
        """Read an instance of one of the forms."""
        forms = [*self.forms]
        if options.tokenizer:  # a text alone, for models of pairs too
            forms = [form for form in (("text",), ("ids",)) if form not in forms] + forms
        is_text = any(len(form) == 1 and form != ("ids",) for form in forms)
        if item.kind == "bytes" and is_text:
            try:
                return (item.payload.tobytes().decode(),)
            except UnicodeDecodeError as error:
                raise InputError(f"the text is no UTF-8: {error}") from None
        if item.kind != "json":
            takes = "a text, as JSON or in UTF-8" if is_text else "two texts, as JSON"
            raise InputError(f"this model takes {takes}, not {item.kind}")
        names = _form_of(item.payload, forms)
        texts = json_texts(item.payload, names)
        places = {name: json_place(item.payload, name) for name in names}
        if names == ("ids",):
            ids = json_array(texts["ids"], "int64", shape=(-1,), where=places["ids"])
            found: list[int] = ids.tolist()
            return found
        return tuple(json_string(texts[name], places[name]) for name in names)

    def _tokens(self, instance: Instance, options: TextOptions) -> Tokens:
        truncates, side = options.truncate, options.truncation_direction
        if isinstance(instance, list):
            return Tokens(self.tokenizer.taken(instance, truncates=truncates, side=side))
        texts = self._texts(instance, options)
        if len(texts) == 2:
            return self.tokenizer.pair(*texts, truncates=truncates, side=side)
        return self.tokenizer.single(texts[0], truncates=truncates, side=side)

    def _texts(self, instance: tuple[str, ...], options: TextOptions) -> tuple[str, ...]:
        texts = instance if len(instance) > 1 else (self.prompted(instance[0], options),)
        return tuple(text.lower() for text in texts) if self._folder.lowercases else texts

    def _by_tokenizer(self, instance: Instance, options: TextOptions) -> object:
        """Answer a call that wants no more than the tokenizer."""
        if options.tokenizer == "decode":
            if not isinstance(instance, list):
                raise InputError('to decode, an instance must be like {"ids": [101, 7592, 102]}')
            self.tokenizer.taken(instance)  # checks them
            return self.tokenizer.decoded(instance, skips=options.skip_special_tokens)
        if isinstance(instance, list):
            raise InputError("to tokenize, an instance must be a text, and not ids of tokens")
        if sum(map(len, instance)) > _MOST_TOKENIZED:
            raise InputError(f"a text to tokenize must have at most {_MOST_TOKENIZED} characters")
        texts = self._texts(instance, options)
        adds = options.add_special_tokens
        return [msgspec.to_builtins(each) for each in self.tokenizer.tokens(*texts, adds=adds)]


def bucket_of(num_tokens: int) -> int:
    """Return the greatest length of texts that share a batch with a text of some tokens.

    That is 16, 24, 32, 48, 64, 96 and so on: more buckets make smaller batches, fewer more padding.
    On one core, texts of 40 tokens in the median (log-normal, sigma 0.9), 8 and 32 at a time, took
    27.5 and 18.9 ms each so, 26.3 and 23.2 with powers of two alone, 54.5 and 79.2 padded to the
    longest, and 30.4 and 22.1 one by one.
    """
    power = _SHORTEST_BUCKET
    while power * 3 // 2 < num_tokens:
        power *= 2
    return power if num_tokens <= power else power * 3 // 2


def _form_of(payload: memoryview, forms: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the form that an instance has; if it has none, the first that has most of its names.

    Then the error, which is said where the instance is read, is about the form that was meant.
    """
    if len(forms) > 1 and bytes(payload[:64]).lstrip()[:1] == b"{":
        try:
            names = {*msgspec.json.decode(payload, type=dict[str, msgspec.Raw])}
        except JsonErrors:
            return forms[0]
        return max(forms, key=lambda form: ({*form} == names, len(names.intersection(form))))
    return forms[0]
