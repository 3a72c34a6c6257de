"""Every byte of a text comes back from its tokens, and every token is predicted once."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from eqzoo.data import text
from eqzoo.data.loader import batches
from eqzoo.data.text import BPE, END, Bytes, Tokens, load_text, load_tokenizer

CODE = b"def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n" * 20
AWKWARD = [
    b"",
    b"\r\n\t  trailing  \n\n\n    indented",
    "Größe - 大きさ - e\u0301 - 🙂".encode(),  # the accent is a character of its own: normalising would join it
    "latin ü".encode("latin-1"),
    b"half a character \xf0\x9f\x99",
    b"\xed\xb2\x80 an encoded surrogate",
    bytes(range(256)),
    END.encode() + b" is but text here",
]


@pytest.fixture(scope="module")
def bpe() -> BPE:
    return BPE.train([CODE], 280)


@pytest.mark.parametrize("awkward", AWKWARD)
@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_text_comes_back_byte_for_byte(name, awkward, bpe):
    tokenizer = Bytes() if name == "bytes" else bpe
    tokens = tokenizer.encode(awkward)
    assert tokenizer.decode(tokens) == awkward
    assert tokenizer.decode(tokens.tolist()) == awkward
    assert tokenizer.lengths[tokens].sum() == len(awkward)
    assert tokenizer.end not in tokens
    assert (tokens < tokenizer.size).all()
    assert tokenizer.lengths[tokenizer.end] == 0
    assert tokenizer.decode([tokenizer.end]) == b""


def test_long_text_is_encoded_in_pieces_that_end_where_lines_do(bpe, monkeypatch):
    assert bpe.encode(CODE).tolist() == bpe._tokenizer.encode(CODE.decode()).ids
    assert list(text._pieces(CODE + b"end")) == [CODE + b"end"]
    monkeypatch.setattr(text, "_PIECE", 32)
    pieces = list(text._pieces(CODE))
    assert b"".join(pieces) == CODE
    assert all(len(piece) <= 32 and piece.endswith(b"\n") for piece in pieces)
    assert bpe.decode(bpe.encode(CODE)) == CODE
    no_line = "大きさ".encode() * 50
    assert bpe.decode(bpe.encode(no_line)) == no_line


def test_bpe_merges_what_is_frequent_and_has_the_size_asked_for(bpe):
    assert bpe.size == 280
    assert len(bpe.lengths) == 280
    assert len(bpe.encode(CODE)) < len(CODE) / 2
    assert BPE.train([b"ab"], 5000).size == 258  # there was no more to merge: 256 bytes, an end, "ab"


def test_bpe_trained_twice_is_the_same_and_saved_is_the_same(bpe, tmp_path):
    again = BPE.train([CODE], 280)
    bpe.save(tmp_path / "tokenizer.json")
    again.save(tmp_path / "again.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    loaded = BPE.load(tmp_path / "tokenizer.json")
    assert (loaded.size, loaded.end) == (bpe.size, bpe.end)
    for each in [CODE, *AWKWARD]:
        np.testing.assert_array_equal(loaded.encode(each), bpe.encode(each))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.json", "tokenizer.json"]


def byte_level(vocabulary: dict[str, int] | None = None) -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token for token, character in enumerate(alphabet)} if vocabulary is None else vocabulary
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_a_tokenizer_json_of_others_is_read_as_they_use_it(tmp_path):
    """With tokens added beside the vocabulary, a start that is put before each text, and a length that it is cut at."""
    theirs = byte_level()
    theirs.add_tokens(["    "])
    theirs.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", theirs.token_to_id("<|begin_of_text|>"))]
    )
    theirs.enable_truncation(8)
    theirs.enable_padding(length=8)
    theirs.save(str(tmp_path / "tokenizer.json"))

    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.size == 259
    assert tokenizer.end == theirs.token_to_id("<|end_of_text|>")
    assert tokenizer.lengths[theirs.token_to_id("    ")] == 4
    assert theirs.token_to_id("    ") in tokenizer.encode(CODE)
    assert theirs.token_to_id("<|begin_of_text|>") not in tokenizer.encode(CODE)
    for each in [CODE, *AWKWARD]:
        assert tokenizer.decode(tokenizer.encode(each)) == each


def test_a_tokenizer_that_changes_the_text_is_refused():
    theirs = byte_level()
    theirs.add_special_tokens([END])
    theirs.normalizer = tokenizers.normalizers.NFC()
    assert BPE(theirs).decode(BPE(theirs).encode(CODE)) == CODE
    with pytest.raises(ValueError, match="the tokenizer changes the text"):
        BPE(theirs).encode("e\u0301".encode())


def test_a_tokenizer_that_is_none_says_what_is_wrong(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="no tokenizer '.*tokenizer.json'; choose 'bytes', 'bpe' or the path"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer.json of the tokenizers library"):
        load_tokenizer(path)
    byte_level().save(str(path))
    with pytest.raises(ValueError, match="tokenizer.json: none of the tokenizer's special tokens .it has none."):
        load_tokenizer(path)
    byte_level({"a": 0, "b": 1}).save(str(path))
    with pytest.raises(ValueError, match="no token for 254 of the 256 bytes"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match="a vocabulary of 256 is too small"):
        BPE.train([CODE], 256)


@pytest.mark.parametrize("length", [2, 8, 9, 10, 16, 17])
def test_each_token_but_the_first_is_predicted_once_from_those_before_it(length):
    stream = np.arange(100, 100 + length, dtype=np.uint16)
    data = Tokens(stream, Bytes(), 8)
    batch = data.read(np.arange(len(data)))
    assert {name: array.dtype for name, array in batch.items()} == {
        "tokens": np.int32,
        "weight": np.float32,
        "bytes": np.int32,
    }
    assert batch["tokens"].shape == (len(data), 9)
    targets, predicted = batch["tokens"][:, 1:], batch["weight"] == 1
    np.testing.assert_array_equal(targets[predicted], stream[1:])
    np.testing.assert_array_equal(batch["tokens"][:, :-1][predicted], stream[:-1])
    assert predicted.any(axis=1).all()
    assert set(batch["weight"][~predicted]) <= {0.0}
    np.testing.assert_array_equal(batch["bytes"], predicted)  # each of these tokens is one byte


def test_a_stream_may_be_longer_than_32_bits_count():
    stream = np.broadcast_to(np.uint16(7), 2**33)
    data = Tokens(stream, Bytes(), 1024)
    last = data.read(np.array([len(data) - 1], np.int32))
    assert last["weight"].sum() == 1023
    assert (last["tokens"][last["tokens"] != data.tokenizer.end] == 7).all()


def test_windows_through_the_loader_count_every_byte_once(tmp_path, bpe):
    documents = [CODE, *AWKWARD]
    for number, document in enumerate(documents):
        (tmp_path / f"{number:02}.txt").write_bytes(document if document else b"\n")
    bpe.save(tmp_path.parent / "bpe.json")
    train, test = load_text(tmp_path, tokenizer=tmp_path.parent / "bpe.json", context=7)
    read = {}
    for name, data in (("train", train), ("test", test)):
        parts = list(batches(data, 4, seed=None))
        assert {len(batch["tokens"]) for batch in parts} == {4}
        read[name] = {key: np.concatenate([batch[key] for batch in parts]) for key in parts[0]}
        stream = data.tokenizer.decode(read[name]["tokens"][:, 1:][read[name]["weight"] > 0])
        assert read[name]["bytes"].sum() == len(stream)
    texts = [(file.read_bytes()) for file in tmp_path.iterdir() if b"\0" not in file.read_bytes()]
    assert sum(part["bytes"].sum() for part in read.values()) == sum(map(len, texts))
    ends = sum((part["tokens"][:, 1:][part["weight"] > 0] == bpe.end).sum() for part in read.values())
    assert ends == len(texts)  # the end of each document is predicted too

    shuffled = list(batches(train, 2, seed=1, steps=len(train) // 2))
    assert sorted(np.concatenate([batch["index"] for batch in shuffled])) == sorted(
        {int(index) for batch in shuffled for index in batch["index"]}
    )


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def text_of(data: Tokens) -> list[bytes]:
    """The documents."""
    ends = np.flatnonzero(data.stream == data.tokenizer.end)
    assert ends[0] == 0
    assert ends[-1] == len(data.stream) - 1
    return [data.tokenizer.decode(part[1:]) for part in np.split(data.stream[:-1], ends[1:-1])]


def test_files_are_held_out_by_their_names_alone(tmp_path):
    names = [f"{folder}/{number}.py" for folder in "ab" for number in range(100)]
    first = write(tmp_path / "first", {name: name.encode() for name in names})
    train, test = load_text(first, tokenizer="bytes")
    held_out = set(text_of(test))
    assert 3 <= len(held_out) <= 20
    assert sorted([*text_of(train), *held_out]) == sorted(name.encode() for name in names)

    more = {name: name.encode() for name in names[:150]} | {f"c/{number}.py": b"new" for number in range(50)}
    _, test = load_text(write(tmp_path / "elsewhere", more), tokenizer="bytes")
    assert {text for text in text_of(test) if text != b"new"} == held_out & {name.encode() for name in names[:150]}


def test_of_a_few_files_one_is_held_out_and_of_one_its_end(tmp_path, monkeypatch):
    for count in (2, 3, 4):
        files = {f"{number}.txt": b"text %d" % number for number in range(count)}
        train, test = load_text(write(tmp_path / str(count), files), tokenizer="bytes")
        assert len(text_of(test)) == 1
        assert sorted(text_of(train) + text_of(test)) == sorted(files.values())

    monkeypatch.setattr(text, "_hash", lambda name: {"0.txt": 0.01, "1.txt": 0.02, "text": 0.03}[name])
    train, test = load_text(tmp_path / "2", tokenizer="bytes")
    assert (text_of(train), text_of(test)) == ([b"text 1"], [b"text 0"])

    lines = [b"line %d\n" % number for number in range(100)]
    for path in (write(tmp_path / "one", {"text": b"".join(lines)}), tmp_path / "one" / "text"):
        train, test = load_text(path, tokenizer="bytes")
        ((start,), (end,)) = text_of(train), text_of(test)
        assert start + end == b"".join(lines)
        assert end in (b"".join(lines[cut:]) for cut in (94, 95, 96))


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_what_a_folder_calls_train_and_test_is_that(name, tmp_path):
    write(tmp_path, {"train.txt": b"train", f"{name}.txt": b"test", "README": b"neither"})
    assert [text_of(data) for data in load_text(tmp_path, tokenizer="bytes")] == [[b"train"], [b"test"]]
    write(tmp_path / "deep", {"train/a": b"a", "train/b/c": b"c", f"{name}/a": b"test"})
    assert [text_of(data) for data in load_text(tmp_path / "deep", tokenizer="bytes")] == [[b"a", b"c"], [b"test"]]


def test_hidden_and_binary_files_are_no_text(tmp_path):
    files = {"a.txt": b"a", "b.txt": b"b", ".git/config": b"hidden", ".hidden": b"hidden", "picture": b"\x89PNG\0\0"}
    train, test = load_text(write(tmp_path, files), tokenizer="bytes")
    assert sorted(text_of(train) + text_of(test)) == [b"a", b"b"]
    # What counts as hidden is inside of the folder.
    train, test = load_text(write(tmp_path / ".cache", {"a.txt": b"a", "b.txt": b"b"}), tokenizer="bytes")
    assert sorted(text_of(train) + text_of(test)) == [b"a", b"b"]


def test_files_of_tokens_as_nanogpt_writes_them(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16) % 250
    tokens.tofile(tmp_path / "train.bin")
    tokens[:50].tofile(tmp_path / "val.bin")
    train, test = load_text(tmp_path, tokenizer="bytes", context=8)
    np.testing.assert_array_equal(train.stream, tokens)
    np.testing.assert_array_equal(test.stream, tokens[:50])
    assert isinstance(train.stream, np.memmap)  # of any size
    np.testing.assert_array_equal(train.read(np.array([2]))["tokens"], [np.arange(16, 25)])

    np.save(tmp_path / "all.npy", tokens.astype(np.int64))
    train, test = load_text(tmp_path / "all.npy", tokenizer="bytes", context=8)
    np.testing.assert_array_equal(train.stream, tokens[:950])
    np.testing.assert_array_equal(test.stream, tokens[950:])

    (tmp_path / "shards").mkdir()
    for number in range(20):
        np.save(tmp_path / "shards" / f"{number}.npy", tokens[:100])
    train, test = load_text(tmp_path / "shards", tokenizer="bytes", context=8)
    assert len(train.stream) + len(test.stream) == 2000


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    for strange in (300, -1):
        np.save(tmp_path / "tokens.npy", np.array([1, 2, strange] * 20))
        train, _ = load_text(tmp_path / "tokens.npy", tokenizer="bytes", context=8)
        with pytest.raises(ValueError, match=f"token {strange} is not one of the tokenizer's 257"):
            train.read(np.array([0]))
    with pytest.raises(ValueError, match="a tokenizer can't be trained on tokens; give the tokenizer.json"):
        load_text(tmp_path / "tokens.npy")


def test_data_that_is_none_says_what_is_understood(tmp_path):
    with pytest.raises(ValueError, match="no data 'shakespeare'; choose 'python', or a file or folder of text or tok"):
        load_text("shakespeare")
    with pytest.raises(ValueError, match="no text and no tokens .*.npy and .bin.* in "):
        load_text(tmp_path)
    with pytest.raises(ValueError, match="a stream of 1 tokens has nothing to predict"):
        Tokens(np.zeros(1, np.uint16), Bytes(), 8)
    write(tmp_path, {"a.txt": b"a", "b.npy": b"not numpy's"})
    with pytest.raises(ValueError, match="has both text and tokens"):
        load_text(tmp_path)
    with pytest.raises(ValueError, match="b.npy can't be read as tokens"):
        load_text(tmp_path / "b.npy", tokenizer="bytes")
    (tmp_path / "odd.bin").write_bytes(b"odd")
    with pytest.raises(ValueError, match="odd.bin can't be read as tokens"):
        load_text(tmp_path / "odd.bin", tokenizer="bytes")
    for array, found in (
        (np.zeros((2, 3), int), r"int64 of shape \(2, 3\)"),
        (np.zeros(99), r"float64 of shape \(99,\)"),
    ):
        np.save(tmp_path / "c.npy", array)
        with pytest.raises(ValueError, match=f"c.npy has {found}; tokens are integers along one axis"):
            load_text(tmp_path / "c.npy", tokenizer="bytes")
    np.save(tmp_path / "d.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="d.npy can't be read as tokens"):
        load_text(tmp_path / "d.npy", tokenizer="bytes")


def test_the_default_is_the_source_of_the_standard_library():
    train, test = load_text(tokenizer="bytes")
    library = Path(sysconfig.get_path("stdlib"))
    documents = {*text_of(train), *text_of(test)}
    assert (library / "argparse.py").read_bytes() in documents
    assert (library / "json" / "decoder.py").read_bytes() in documents
    assert Path(np.__file__).read_bytes() not in documents
    assert 0.01 < len(test.stream) / len(train.stream) < 0.1


def test_importing_text_imports_no_tokenizers_and_missing_ones_are_named():
    code = (
        "import sys, eqzoo.data.text as text\n"
        "assert 'tokenizers' not in sys.modules\n"
        "sys.modules['tokenizers'] = None\n"
        "text.load_tokenizer('bytes')\n"
        "try: text.load_tokenizer('bpe', [b'text'])\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "BPE needs tokenizers: pip install 'eqzoo[train]'\n"
