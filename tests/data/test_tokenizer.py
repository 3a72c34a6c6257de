"""Published tokenizers give what transformers gives with the same files."""

import contextlib
import json
from pathlib import Path

import jinja2
import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from eqzoo.data import BPE, Bytes, Tokenizer
from tests.server import serving_as_the_hub

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "Größe, 大きさ, e\u0301, 🙂 and 👩‍👩‍👧!",
    "  two spaces,\ta tab\n\nand don't you forget it ",
]
TEXTS = [*LINES, "", "unseen words: zyzzyva ☃", "<s>not a start</s> or is it?"]
CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße 🙂"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "More?"},
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]

TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "blocks": """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {% if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] | trim }}{{ eos_token }}{%- endgeneration %}
    {% else %}
[INST] {{ message['content'] }} [/INST]
    {% endif %}
{%- endfor %}""",
    "tools": """{%- set ns = namespace(turns=0) %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}{% set ns.turns = ns.turns + 1 %}{{ message | tojson }}{%- endfor %}
{{- ns.turns }} {{ strftime_now('%Y') }} {{ 'thinking' if enable_thinking else 'not thinking' }}""",
}


def byte_level() -> tokenizers.Tokenizer:
    """As Llama 3's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """As Llama 2's: spaces are characters, and what the vocabulary lacks is spelt in bytes."""
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(LINES[:1], trainer)
    written = json.loads(trained.to_str())["model"]
    vocabulary = written["vocab"] | {f"<0x{byte:02X}>": len(written["vocab"]) + byte for byte in range(256)}
    merges = [tuple(merge) for merge in written["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """As BERT's, with the truncation and padding that sentence-transformers leaves in its files."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8, pad_token="[PAD]")
    return tokenizer


KINDS = {
    "byte_level": (byte_level, {"bos_token": "<s>", "eos_token": "</s>"}),
    "metaspace": (metaspace, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "word_piece": (word_piece, {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}),
}
MADE = {kind: make() for kind, (make, _) in KINDS.items()}


def write(folder: Path, kind: str, **config) -> Path:
    """The tokenizer as published, and what tokenizer_config.json says."""
    folder.mkdir(exist_ok=True)
    MADE[kind].save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", **KINDS[kind][1], **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


def theirs(folder: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_transformers(kind, tmp_path):
    ours, upstream = Tokenizer.load(write(tmp_path, kind)), theirs(tmp_path)
    assert (ours.start, ours.end, ours.pad) == (upstream.bos_token_id, upstream.eos_token_id, upstream.pad_token_id)
    assert ours.size == len(upstream)
    for text in TEXTS:
        tokens = ours.encode(text)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == upstream.encode(text)
        assert ours.encode(text, special=False).tolist() == upstream.encode(text, add_special_tokens=False)
        decode = lambda special: upstream.decode(
            tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        assert ours.decode(tokens) == decode(False)
        assert ours.decode(tokens, special=True) == decode(True)


def test_a_pair_is_one_sequence_of_two_types(tmp_path):
    ours, upstream = Tokenizer.load(write(tmp_path, "word_piece")), theirs(tmp_path)
    tokens, types = ours.encode_pair(TEXTS[0], TEXTS[1])
    assert set(types.tolist()) == {0, 1}
    expected = upstream(TEXTS[0], TEXTS[1], return_token_type_ids=True)
    assert (tokens.tolist(), types.tolist()) == (expected["input_ids"], expected["token_type_ids"])


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("end", [True, False])
def test_tokenizer_json_alone_decides_about_start_and_end(start, end, tmp_path):
    """As in transformers 5."""
    ours = Tokenizer.load(write(tmp_path, "byte_level", add_bos_token=start, add_eos_token=end))
    tokens = ours.encode("fox").tolist()
    assert (tokens[0] == ours.start, tokens[-1] == ours.end) == (True, False)
    assert tokens == theirs(tmp_path).encode("fox")


def test_special_tokens_are_found_in_the_files_that_old_repositories_have(tmp_path):
    write(tmp_path, "byte_level")
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).end is None
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1, "bos_token_id": None}))
    assert (Tokenizer.load(tmp_path).start, Tokenizer.load(tmp_path).end) == (None, 1)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<s>", "lstrip": False}}))
    assert Tokenizer.load(tmp_path).end == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert Tokenizer.load(tmp_path).end is None
    assert Tokenizer.load(tmp_path / "tokenizer.json").size == Tokenizer.load(tmp_path).size


@pytest.mark.parametrize("kind", [*KINDS, "bytes", "bpe"])
def test_a_stream_gives_whole_characters_as_soon_as_it_can(kind, tmp_path):
    if kind in KINDS:
        tokenizer = Tokenizer.load(write(tmp_path, kind))
    else:
        tokenizer = Bytes() if kind == "bytes" else BPE.train([line.encode() for line in LINES], 280)
    for text in TEXTS:
        tokens = tokenizer.encode(text).tolist()
        if tokenizer.end is not None:
            tokens.insert(len(tokens) // 2, tokenizer.end)
        whole = tokenizer.decode(tokens)
        whole = whole.decode(errors="replace") if isinstance(whole, bytes) else whole
        pieces = list(tokenizer.stream(iter(tokens)))
        assert "".join(pieces) == whole
        assert all(pieces)
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])
    # Each piece is there before the next token is asked for, and half a character is shown at the end at last.
    half = Bytes().encode("🙂!🙂")[:-1].tolist()
    asked: list[int] = []
    stream = Bytes().stream(asked.append(token) or token for token in half)
    assert (next(stream), len(asked)) == ("🙂", 4)
    assert (next(stream), len(asked)) == ("!", 5)
    assert next(stream) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("file", [True, False])
def test_chats_are_written_as_transformers_writes_them(template, file, tmp_path):
    source = TEMPLATES[template]
    ours = Tokenizer.load(write(tmp_path, "byte_level", **({} if file else {"chat_template": source})))
    assert file == (ours.chat_template is None)
    if file:
        (tmp_path / "chat_template.jinja").write_text(source)
        ours = Tokenizer.load(tmp_path)
    upstream = theirs(tmp_path)
    for prompt in (True, False):
        expected = upstream.apply_chat_template(
            CHAT, tools=TOOLS, tokenize=False, add_generation_prompt=prompt, enable_thinking=True
        )
        text = ours.apply_chat_template(
            CHAT, tools=TOOLS, add_generation_prompt=prompt, variables={"enable_thinking": True}
        )
        assert text == expected
        ids = upstream.apply_chat_template(
            CHAT, tools=TOOLS, add_generation_prompt=prompt, enable_thinking=True, return_dict=False
        )
        assert ours.encode(text, special=False).tolist() == ids


def test_the_default_of_several_templates(tmp_path):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert Tokenizer.load(write(tmp_path, "byte_level", chat_template=several)).apply_chat_template(CHAT) == "yes"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_but_what_it_is_given(attack, tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, "byte_level", chat_template=attack))
    with contextlib.suppress(jinja2.TemplateError, OverflowError, TypeError):  # it is refused
        assert tokenizer.apply_chat_template(CHAT) == ""  # or reads as what isn't there


def test_what_is_wrong_is_said_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer.json; let transformers write one"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer.json of the tokenizers library"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="this tokenizer has no chat template"):
        Tokenizer.load(write(tmp_path, "byte_level")).apply_chat_template(CHAT)
    refusing = write(tmp_path, "byte_level", chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="the chat template refuses these messages: roles must alternate"):
        Tokenizer.load(refusing).apply_chat_template(CHAT)
    broken = write(tmp_path, "byte_level", chat_template="{% if %}")
    with pytest.raises(ValueError, match="the chat template is none that jinja understands"):
        Tokenizer.load(broken).apply_chat_template(CHAT)


def test_a_repository_on_the_hub(tmp_path, monkeypatch):
    with serving_as_the_hub(tmp_path, monkeypatch) as server:
        (server.root / "owner").mkdir(parents=True)
        write(server.root / "owner" / "model", "byte_level")
        assert Tokenizer.load("owner/model").encode("fox").tolist()[0] == 0
        (server.root / "owner" / "empty").mkdir()
        with pytest.raises(ValueError, match="has no tokenizer.json"):
            Tokenizer.load("owner/empty")
