"""Tokenizers as they are published: tokenizer.json, the special tokens beside it, and the template of a chat."""

import datetime
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Integer

from eqzoo._optional import needed_for
from eqzoo.checkpoint.hub import fetch_files
from eqzoo.data.text import stream_text

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back, as transformers does it with the same files.

    `size` is the number of ids. `start`, `end` and `pad` are those that begin a text, end it and fill it up, None where
    there is no such; `special_tokens` has the names of these and others, as templates of chats know them.
    """

    size: int
    start: int | None
    end: int | None
    pad: int | None
    special_tokens: Mapping[str, str]
    chat_template: str | None

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        tokenizer.no_truncation()  # files keep what they were trained with
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.special_tokens = dict(special_tokens or {})
        self.start, self.end, self.pad = (self._id(name) for name in ("bos_token", "eos_token", "pad_token"))
        self.chat_template = chat_template

    @classmethod
    def load(cls, source: str | os.PathLike, *, revision: str | None = None) -> "Tokenizer":
        """The tokenizer of a repository on the Hugging Face hub, or of a local folder or its tokenizer.json."""
        path = fetch_files(source, FILES, revision=revision)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"{source} has no tokenizer.json; let transformers write one: "
                f"`AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
            )
        with needed_for("a tokenizer", "language"):
            import tokenizers
        try:
            tokenizer = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library's own class is Exception
            raise ValueError(f"{file} is not a tokenizer.json of the tokenizers library: {error}") from error
        config = _json(file.with_name("tokenizer_config.json"))
        special = _special_tokens(file.parent, config, tokenizer)
        return cls(tokenizer, special_tokens=special, chat_template=_chat_template(file.parent, config))

    def encode(self, text: str, *, special: bool = True, length: int | None = None) -> Int[np.ndarray, " tokens"]:
        """The ids of a text, between those that the model expects around it if `special`; at most `length` in all.

        What stands for a special token in the text becomes that token.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=special and length is None)
        if length is not None:
            around = self._tokenizer.num_special_tokens_to_add(False) if special else 0
            encoding.truncate(max(0, length - around))
            encoding = self._tokenizer.post_process(encoding, add_special_tokens=special)
        return np.array(encoding.ids, np.int32)

    def encode_pair(self, first: str, second: str) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " tokens"]]:
        """The ids of two texts in one sequence, and of which of them each is: a model's `token_types`."""
        encoding = self._tokenizer.encode(first, second)
        return np.array(encoding.ids, np.int32), np.array(encoding.type_ids, np.int32)

    def decode(self, tokens: Sequence[int] | Integer[np.ndarray, " tokens"], *, special: bool = False) -> str:
        """The text of these ids, with the special tokens among them or without."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=not special)

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of each token as it comes, as soon as its characters are whole; together, what `decode` gives."""
        return stream_text(self.decode, tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A chat as the model was trained to see it, up to where it answers; `encode(..., special=False)` takes it.

        A message is such as `{"role": "user", "content": "Hello"}`, a tool its JSON schema. Other `variables` of the
        template are set by name, such as `{"enable_thinking": False}`. The template is not trusted: it sees these
        values and nothing else.
        """
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template: its model may not be made for chats; set `chat_template`, or "
                "write the prompt out as the model's authors describe"
            )
        given = {**self.special_tokens, "messages": list(messages), "tools": tools, "documents": None}
        given |= {"add_generation_prompt": add_generation_prompt, **(variables or {})}
        return _template(self.chat_template).render(json.loads(json.dumps(given)))

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _special_tokens(folder: Path, config: Mapping[str, Any], tokenizer: Any) -> dict[str, str]:
    """The special tokens by transformers' names for them, from the first file that states each."""
    result = {}
    stated, model = _json(folder / "special_tokens_map.json"), _json(folder / "config.json")
    for name in _SPECIAL:
        token = config.get(name, stated.get(name))
        token = token["content"] if isinstance(token, dict) else token
        number = model.get(f"{name}_id")
        if token is None and name not in config and isinstance(number, int):
            token = tokenizer.id_to_token(number)
        if token is not None:
            result[name] = token
    return result


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return next((each["template"] for each in template if each["name"] == "default"), None)
    return template


@functools.lru_cache(maxsize=8)
def _template(source: str) -> Any:
    """The template in jinja's sandbox, with what transformers offers to templates."""
    with needed_for("a chat template", "language"):
        import jinja2
        import jinja2.ext
        import jinja2.parser
        import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks, for training, what the model says; here it does nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # jinja's own escapes what means something in HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is none that jinja understands: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise ValueError(f"the chat template refuses these messages: {message}")


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
