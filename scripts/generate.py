"""Text from a language model, as it is written. For example:

python scripts/generate.py --model openai-community/gpt2 "The history of the"

python scripts/generate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --chat --temperature 0.7 --top-p 0.9

python scripts/generate.py --model runs/gpt2-1 --max-tokens 300 "def main():"
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro

import eqzoo
from eqzoo import generation, host, train
from eqzoo.checkpoint.hub import fetch_files
from eqzoo.data import Tokenizer
from eqzoo.tree import quantize


@dataclass(frozen=True)
class Options:
    prompts: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT ...", help_behavior_hint="")
    ]
    """Texts to go on with, one after the other; in a chat, what to say first."""
    model: str
    """What eqzoo.load takes (a repository on the hub, a folder with upstream's files), or the folder of a finished
    run."""
    tokenizer: str | None = None
    """The repository, folder or tokenizer.json of the tokenizer, if not the model's own."""
    chat: bool = False
    """Talk to the model, by its tokenizer's template of chats, until an empty line."""
    system: str | None = None
    """In a chat, what the model is told before."""
    max_tokens: int = 200
    """How many tokens to write at most, each time."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """What the weights are rounded to; the smaller, the faster, and the further from what the model would write."""
    seed: int = 0
    """Another one, another text, where tokens are drawn (with a temperature)."""
    sampling: generation.Sampling = generation.Sampling()


def main(options: Options) -> None:
    if not options.prompts and not options.chat:
        raise ValueError("there is no prompt; write one behind the options, or pass --chat")
    folder = Path(options.model)
    source = folder / "model.safetensors" if (folder / "metrics.jsonl").is_file() else options.model
    model = eqzoo.load(source, dtype=jnp.bfloat16 if options.dtype == "bfloat16" else jnp.float32)
    if options.dtype == "int8":
        model = quantize(model, "*")
    tokenizer = Tokenizer.load(options.tokenizer or options.model)
    stop_tokens = ends(options.model, tokenizer)
    key = jax.random.key(options.seed)

    def write(tokens: Sequence[int], number: int) -> str:
        """Print what follows these tokens while it comes, then how fast it came."""
        parts = generation.stream(
            model,
            [tokens],
            options.max_tokens,
            sampling=options.sampling,
            key=jax.random.fold_in(key, number),
            stop_tokens=stop_tokens,
        )
        clock = Clock()
        text = ""
        for piece in tokenizer.stream(clock.watch(parts)):
            print(piece, end="", flush=True)
            text += piece
        print()
        print(f"[{clock}]", file=sys.stderr)
        return text

    if not options.chat:
        for number, prompt in enumerate(options.prompts):
            print(prompt, end="", flush=True)
            write(tokenizer.encode(prompt).tolist(), number)
        return

    messages = [{"role": "system", "content": options.system}] if options.system else []
    for number, said in enumerate(lines(options.prompts)):
        messages.append({"role": "user", "content": said})
        tokens = tokenizer.encode(tokenizer.apply_chat_template(messages), special=False).tolist()
        messages.append({"role": "assistant", "content": write(tokens, number)})


def ends(source: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text: the tokenizer's own, and what the model's files name besides."""
    found: set[int] = set() if tokenizer.end is None else {tokenizer.end}
    folder = fetch_files(source, ("generation_config.json", "config.json"))
    for file in (folder / "generation_config.json", folder / "config.json"):
        stated: Any = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if stated is not None:
            found |= {*stated} if isinstance(stated, list) else {stated}
    return sorted(found)


def lines(first: Sequence[str]) -> Iterator[str]:
    """What the user says: the given texts, then line after line from the keyboard."""
    for text in first:
        print(f"> {text}")
        yield text
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        if not text:
            return
        yield text


class Clock:
    """How long the first token took, for the prompt had to be read, and how fast others came; the first time, both
    have their program compiled, so that what came second counts for neither."""

    def __init__(self):
        self.times = [time.perf_counter()]
        self.counts = [0]

    def watch(self, parts: Iterator[list[generation.Generated]]) -> Iterator[int]:
        for (part,) in parts:
            self.times.append(time.perf_counter())
            self.counts.append(len(part.tokens))
            yield from part.tokens

    def __str__(self) -> str:
        waited = f"first token after {self.times[1] - self.times[0]:.2f} s"
        if len(self.times) < 4:
            return waited
        return f"{waited}, then {sum(self.counts[3:]) / (self.times[-1] - self.times[2]):.1f} tokens a second"


if __name__ == "__main__":
    options = train.parse(Options, __doc__)
    host.tune()
    main(options)
