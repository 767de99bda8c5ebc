"""Text to token ids and back, as the model's own tokenizer.json says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minivllm.chat_template import ChatTemplate, read_templates
from minivllm.config import read_json
from minivllm.detokenizer import Detokenizer, StopChecker
from minivllm.safetensors_file import refuse_lfs_pointer

__all__ = ["Detokenizer", "StopChecker", "Tokenizer"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer, with its chat template; any number of threads may use it at once.

    Parameters
    ----------
    backend
        The tokenizer proper. Padding and truncation are turned off in it.
    special_tokens
        ``bos_token``, ``eos_token`` and so on, as text.
    templates
        Chat templates by name, as Jinja source.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        # All settings are made here: a change while another thread encodes would fail, "Already borrowed".
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.bos_id = self._id_of("bos_token")
        self.eos_ids: tuple[int, ...] = tuple(i for i in [self._id_of("eos_token")] if i is not None)
        self.chat_template = ChatTemplate(templates, self.special_tokens) if templates else None
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.decoder_kind = _decoder_kind(json.loads(backend.to_str())["decoder"])
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer | None:
        """Load the tokenizer of a model directory or a .gguf file; None where a directory has none at all.

        Raises
        ------
        ValueError
            When there are files of a tokenizer, but no tokenizer.json, or it cannot be read.
        """
        path = Path(path)
        if path.suffix == ".gguf" and not path.is_dir():
            from minivllm.gguf import GGUFFile

            return GGUFFile(path).tokenizer()
        file, config_file = path / "tokenizer.json", path / "tokenizer_config.json"
        if not file.is_file():
            others = [
                name
                for name in ("tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
                if (path / name).is_file()
            ]
            if not others:
                return None
            raise ValueError(
                f"{path} has {', '.join(others)} but no tokenizer.json, which is what is read; "
                "transformers' AutoTokenizer can write one with save_pretrained"
            )
        with file.open("rb") as stream:
            refuse_lfs_pointer(file, stream.read(64))
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(f"{file} cannot be read: {error}") from None
        config = read_json(config_file) if config_file.is_file() else {}
        # The config's add_bos_token and add_eos_token are passed over, as by transformers: where there is a
        # tokenizer.json, its post-processor says what is put around a text.
        return cls(backend, _special_tokens(path, config), read_templates(path, config))

    def encode(self, text: str) -> list[int]:
        """Encode a text, with the special tokens that the model's tokenizer puts around one.

        Special tokens spelt out in the text are parsed. A begin-of-text token is not added to a text that
        begins with one, such as a rendered chat.
        """
        if not isinstance(text, str):
            raise ValueError(f"a text must be a str, not {type(text).__name__}")
        ids: list[int] = self._backend.encode(_utf8(text)).ids
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode ids; those that the tokenizer does not know (of a padded vocabulary) leave no text."""
        known = [token_id for token_id in ids if 0 <= token_id < 1 << 32]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; special tokens are spelt out."""
        return self.decode([token_id], skip_special_tokens=False)

    def piece(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return a token as the vocabulary spells it; None for an unknown or a skipped one."""
        if not 0 <= token_id < 1 << 32 or (skip_special_tokens and token_id in self._special_ids):
            return None
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Return what a token adds to the bytes of a text; for byte-level tokenizers alone."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self.piece(token_id, False) or ""
            try:
                known = bytes([_BYTE_OF[character] for character in piece])
            except KeyError:  # An added token may hold characters that stand for no byte; it is then as spelt.
                known = piece.encode()
            self._bytes[token_id] = known
        return known

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Encode a conversation through the model's chat template.

        The template writes all special tokens itself, so none is added. Further arguments (``tools``, ...)
        reach the template; a sampling parameter among them is a TypeError.

        Raises
        ------
        ValueError
            When the model has no chat template, or it refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt, **kwargs)
        ids: list[int] = self._backend.encode(_utf8(text), add_special_tokens=False).ids
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Render a conversation to text, as `apply_chat_template` encodes it."""
        if self.chat_template is None:
            raise ValueError("the model has no chat template; render the conversation and pass it as a prompt")
        return self.chat_template.render(messages, add_generation_prompt, **kwargs)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
        self._backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        config["clean_up_tokenization_spaces"] = False
        if self.chat_template is not None:
            sources = self.chat_template.sources
            config["chat_template"] = sources["default"] if set(sources) == {"default"} else sources
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id


def _utf8(text: str) -> str:
    # Half of a surrogate pair, as JSON can carry it, cannot be encoded; it becomes the replacement character.
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if not text.isascii() else text


def _special_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    map_file = path / "special_tokens_map.json"
    fallback = read_json(map_file) if map_file.is_file() else {}
    tokens = {}
    for name in _SPECIAL_NAMES:
        token = config[name] if name in config else fallback.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _decoder_kind(decoder: Mapping[str, Any] | None) -> str:
    """Say how ids become text: ``"bytes"``, ``"byte_fallback"``, or ``"other"``."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes"
    # Fuse and the strip after it act on the whole text, at its start alone.
    plain = all(
        step["type"] in ("Replace", "ByteFallback", "Fuse", "Metaspace")
        or (step["type"] == "Strip" and step["start"] <= 1 and step["stop"] == 0 and "Fuse" in kinds)
        for step in steps
    )
    return "byte_fallback" if plain and "ByteFallback" in kinds else "other"


def _byte_alphabet() -> dict[str, int]:
    """Map the characters that byte-level vocabularies spell bytes with to those bytes.

    Printable Latin-1 characters stand for themselves; the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
