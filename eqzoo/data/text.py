"""Text as one stream of tokens, and windows of it."""

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Integer

from eqzoo._optional import needed_for
from eqzoo.checkpoint._atomic import written_atomically

END = "<|endoftext|>"
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>")
_TOKENS = (".npy", ".bin")
_TEST_NAMES = ("test", "val", "valid", "validation")
_NO_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data", "encodings"}  # prose, tables
_PIECE = 1 << 20


class Bytes:
    """Each byte is a token; one more ends a document. `lengths` is how many bytes each token stands for."""

    size = 257
    end = 256
    lengths: Int[np.ndarray, " size"]

    def __init__(self):
        self.lengths = np.array([1] * 256 + [0], np.int32)

    def encode(self, text: str | bytes) -> Integer[np.ndarray, " tokens"]:
        return np.frombuffer(_as_bytes(text), np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int] | Integer[np.ndarray, " tokens"]) -> bytes:
        return bytes(int(token) for token in tokens if token < 256)

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of each token as it comes, as soon as its characters are whole."""
        return stream_text(lambda tokens: self.decode(tokens).decode(errors="replace"), tokens)


class BPE:
    """A byte-level BPE as GPT-2's, of the `tokenizers` library; `BPE.load` reads anybody's `tokenizer.json`.

    Text that is no UTF-8 comes back byte for byte too. What stands for a special token in the text is text.
    """

    size: int
    end: int
    lengths: Int[np.ndarray, " size"]

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # as text
        vocabulary = tokenizer.get_vocab()
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        self.size = max(vocabulary.values(), default=-1) + 1
        self._bytes = [b""] * self.size
        for name, token in vocabulary.items():
            if token in added:
                self._bytes[token] = b"" if name in special else name.encode()
            elif set(name) <= byte_of.keys():
                self._bytes[token] = bytes(byte_of[character] for character in name)
        missing = byte_of.keys() - vocabulary.keys()
        if missing:
            raise ValueError(
                f"the tokenizer has no token for {len(missing)} of the 256 bytes, so it can't give any text back; "
                f"choose a byte-level BPE, as those of GPT-2 and Llama 3 are"
            )
        end = next((name for name in _ENDS if name in special), None)
        if end is None:
            raise ValueError(
                f"none of the tokenizer's special tokens ({', '.join(sorted(special)) or 'it has none'}) is known to "
                f"end a document; add one of {', '.join(_ENDS)} to it"
            )
        self.end = vocabulary[end]
        self.lengths = np.array([len(text) for text in self._bytes], np.int32)
        self._of_byte = [vocabulary[character] for character in byte_of]

    @classmethod
    def train(cls, documents: Sequence[bytes], size: int) -> "BPE":
        """Merge what stands together most often, until there are `size` tokens."""
        if size < 257:
            raise ValueError(f"a vocabulary of {size} is too small; 256 bytes and the end of a document need 257")
        tokenizers = _tokenizers()
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size, special_tokens=[END], initial_alphabet=byte_level.alphabet(), show_progress=False
        )
        texts = (piece.decode(errors="ignore") for document in documents for piece in _pieces(document))
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | Path) -> "BPE":
        """The one in a `tokenizer.json`."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            tokenizer = _tokenizers().Tokenizer.from_str(text)
        except Exception as error:  # the library's own class is Exception
            raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from error
        try:
            return cls(tokenizer)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write it as a `tokenizer.json`, which is there whole or not at all."""
        with written_atomically(path) as file:
            file.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")

    def encode(self, text: str | bytes) -> Integer[np.ndarray, " tokens"]:
        parts = [np.array(self._encode(piece), np.uint32) for piece in _pieces(_as_bytes(text))]
        return np.concatenate([np.zeros(0, np.uint32), *parts])

    def _encode(self, piece: bytes) -> list[int]:
        tokens = []
        # A byte that is no UTF-8 is decoded to a lone surrogate.
        for part in re.split("([\udc80-\udcff])", piece.decode(errors="surrogateescape")):
            if "\udc80" <= part <= "\udcff":
                tokens.append(self._of_byte[ord(part) - 0xDC00])
            else:
                tokens += self._tokenizer.encode(part, add_special_tokens=False).ids
        if self.decode(tokens) != piece:
            raise ValueError(
                "the tokenizer changes the text (it may normalise it, or put a space before it), so that bits per byte "
                "would be wrong; choose one that doesn't"
            )
        return tokens

    def decode(self, tokens: Sequence[int] | Integer[np.ndarray, " tokens"]) -> bytes:
        return b"".join(self._bytes[token] for token in tokens)

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of each token as it comes, as soon as its characters are whole."""
        return stream_text(lambda tokens: self.decode(tokens).decode(errors="replace"), tokens)


ByteTokenizer = Bytes | BPE


def stream_text(decode: Callable[[list[int]], str], tokens: Iterable[int]) -> Iterator[str]:
    """The text that each token adds to that of the tokens before it; together, what `decode` makes of them all.

    What ends in half a character waits for the rest of it.
    """
    shown: list[int] = []  # the last that were given out, for what a token adds can depend on them
    waiting: list[int] = []
    before = ""
    for token in tokens:
        waiting.append(int(token))
        text = decode(shown + waiting)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            if text == before:  # a special token, which has no text
                shown, waiting = shown + waiting, []
                continue
            yield text[len(before) :]
            shown, waiting = waiting, []
            before = decode(shown)
    if waiting:
        yield decode(shown + waiting)[len(before) :]


def load_tokenizer(name: str | Path, documents: Sequence[bytes] | None = None, *, size: int = 4096) -> ByteTokenizer:
    """`"bytes"`; `"bpe"`, trained on `documents`; or the path of a `tokenizer.json`."""
    if name == "bytes":
        return Bytes()
    if name == "bpe":
        if documents is None:
            raise ValueError("a tokenizer can't be trained on tokens; give the tokenizer.json that they were made with")
        return BPE.train(documents, size)
    if not Path(name).is_file():
        raise ValueError(f"no tokenizer {str(name)!r}; choose 'bytes', 'bpe' or the path of a tokenizer.json")
    return BPE.load(name)


class Tokens:
    """Windows of a stream of tokens: window i predicts tokens i * context + 1 to (i + 1) * context of it, each from
    those of the window before it. So every token but the first is predicted exactly once.

    What `read` gives: `tokens`, one more than are predicted; and for each that is predicted its `weight`, 0 after the
    end of the stream, and the number of `bytes` that it stands for.
    """

    def __init__(self, stream: Integer[np.ndarray, " stream"], tokenizer: ByteTokenizer, context: int):
        if len(stream) < 2:
            raise ValueError(f"a stream of {len(stream)} tokens has nothing to predict; give one of at least 2")
        self.stream = stream
        self.tokenizer = tokenizer
        self.context = context

    def __len__(self) -> int:
        return -(-(len(self.stream) - 1) // self.context)

    def read(self, indices: Integer[np.ndarray, " batch"]) -> dict[str, np.ndarray]:
        positions = np.asarray(indices, np.int64)[:, None] * self.context + np.arange(self.context + 1)
        inside = positions < len(self.stream)
        tokens = np.where(inside, self.stream[np.minimum(positions, len(self.stream) - 1)], self.tokenizer.end)
        strange = tokens[(tokens < 0) | (tokens >= self.tokenizer.size)]
        if len(strange):
            raise ValueError(
                f"token {strange[0]} is not one of the tokenizer's {self.tokenizer.size}; "
                f"give the tokenizer that these tokens were made with"
            )
        tokens = tokens.astype(np.int32)
        return {
            "tokens": tokens,
            "weight": inside[:, 1:].astype(np.float32),
            "bytes": self.tokenizer.lengths[tokens[:, 1:]],  # an end has none
        }


def load_text(
    data: str | Path = "python", *, tokenizer: str | Path = "bpe", vocab: int = 4096, context: int = 256
) -> tuple[Tokens, Tokens]:
    """Training and held-out text as windows of tokens.

    `data` is `"python"` (the source of the standard library of the Python that runs this), or a file or a folder of
    text, or of tokens: one-dimensional `.npy`, or `.bin` of uint16. What a folder calls train and test (or val, valid,
    validation) is that. Else a twentieth of its files is held out, by a hash of their names, and of a file its end.

    `tokenizer` is `"bytes"`, `"bpe"` (with `vocab` tokens, trained on the training text), or a `tokenizer.json`.
    """
    train_files, test_files = _library() if data == "python" else _find(Path(data))
    tokens = {file.suffix in _TOKENS for file in train_files + test_files}
    if len(tokens) > 1:
        raise ValueError(f"{data} has both text and tokens ({' and '.join(_TOKENS)}); give a folder of one of them")
    if tokens == {True}:
        made = load_tokenizer(tokenizer)
        streams = [_stream(files) for files in (train_files, test_files)]
        if not test_files:
            streams = np.split(streams[0], [_cut(len(streams[0]))])
    else:
        train, test = ([file.read_bytes() for file in files] for files in (train_files, test_files))
        if not test_files:
            (text,) = train
            cut = text.find(b"\n", _cut(len(text))) + 1 or _cut(len(text))
            train, test = [text[:cut]], [text[cut:]]
        made = load_tokenizer(tokenizer, train, size=vocab)
        streams = [_join(documents, made) for documents in (train, test)]
    train, test = (Tokens(stream, made, context) for stream in streams)
    return train, test


def _join(documents: Sequence[bytes], tokenizer: ByteTokenizer) -> Integer[np.ndarray, " stream"]:
    """The documents one after the other, with an end before and after each, so that all of each is predicted."""
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    end = np.array([tokenizer.end], dtype)
    parts = [part for document in documents for part in (tokenizer.encode(document).astype(dtype), end)]
    return np.concatenate([end, *parts])


def _stream(files: Sequence[Path]) -> Integer[np.ndarray, " stream"]:
    arrays = [_read_tokens(file) for file in files]
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.zeros(0, np.uint16), *arrays])


def _read_tokens(file: Path) -> Integer[np.ndarray, " stream"]:
    try:
        if file.suffix == ".bin":
            return np.memmap(file, np.uint16, "r")
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{file} can't be read as tokens: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{file} has {array.dtype} of shape {array.shape}; tokens are integers along one axis")
    return array


def _library() -> tuple[list[Path], list[Path]]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file for file in folder.rglob("*.py") if not _NO_LIBRARY & set(file.relative_to(folder).parts)]
    if not files:
        raise ValueError(f"the standard library's source is not in {folder}; give a file or folder of text")
    return _split(folder, files)


def _find(path: Path) -> tuple[list[Path], list[Path]]:
    """Files to train on and files to hold out, of which there are none if there is but one."""
    if path.is_file():
        return [path], []
    if not path.is_dir():
        raise ValueError(f"no data {str(path)!r}; choose 'python', or a file or folder of text or tokens")
    train = [entry for entry in path.iterdir() if entry.stem == "train"]
    test = [entry for entry in path.iterdir() if entry.stem in _TEST_NAMES]
    if train and test:
        train, test = ([file for entry in entries for file in _files(entry)] for entries in (train, test))
    else:
        train, test = _split(path, _files(path))
    if not train:
        raise ValueError(f"no text and no tokens ({' and '.join(_TOKENS)}) in {path}")
    return train, test


def _files(path: Path) -> list[Path]:
    """Those that aren't hidden, and hold text or tokens."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    visible = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    return sorted(file for file in visible if file.suffix in _TOKENS or _is_text(file))


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(8192)


def _split(folder: Path, files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Hold out a twentieth of the files, at least one of several, wherever the folder is and whatever else is in it."""
    places = {file: _hash(file.relative_to(folder).as_posix()) for file in sorted(files)}
    limit = max(0.05, min(places.values(), default=0.0))
    held_out = [file for file, place in places.items() if place <= limit and place < max(places.values())]
    return [file for file in places if file not in set(held_out)], held_out


def _hash(name: str) -> float:
    """A number in [0, 1) that looks random."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _cut(length: int) -> int:
    return length - length // 20


def _pieces(text: bytes) -> Iterator[bytes]:
    """Lines of the text, as many at a time as a tokenizer takes without much memory."""
    start = 0
    while start < len(text):
        newline = text.rfind(b"\n", start, start + _PIECE)
        end = start + _PIECE if newline < 0 or start + _PIECE >= len(text) else newline + 1
        yield text[start:end]
        start = end


def _byte_characters() -> list[str]:
    """What a byte-level vocabulary writes for each byte: itself if it can be seen, else a character from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _tokenizers():
    with needed_for("BPE"):
        import tokenizers
    return tokenizers
