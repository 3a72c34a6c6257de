"""Text from language models: a prompt is read in one pass, then token after token is chosen and read.

Any model takes part that has `empty_cache(length)`, `extend(tokens, cache, count=...)` and `logits(hidden)`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from eqzoo import nn

LogitFunction = Callable[
    [Float[Array, " vocab"], Int[Array, " length"], Int[Array, ""]],
    Float[Array, " vocab"],
]

_READ_AT_ONCE = 512  # tokens of a prompt, so that a long one's attention scores fit into memory


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from the logits, as transformers does it and in this order.

    Tokens that occurred already have their logits divided by `repetition_penalty` (multiplied if negative). Without a
    `temperature` the likeliest token is taken. With one, logits are divided by it, then a token is drawn from the
    `top_k` likeliest, of these from the fewest that have `top_p` of the probability together, and of these from those
    at least `min_p` times as likely as the likeliest.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; 1 draws one as often as the model expects it."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens."""
    top_p: float | None = None
    """Draw from the fewest tokens that are this probable together."""
    min_p: float | None = None
    """Draw from the tokens that are this many times as likely as the likeliest."""
    repetition_penalty: float | None = None
    """Above 1, tokens that occurred already become less likely."""

    def __post_init__(self):
        _check("temperature", self.temperature, self.temperature >= 0, "at least 0; 0 takes the likeliest token")
        _check("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1, or None for all")
        _check("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1, or None")
        _check("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1, or None")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, penalty is None or penalty > 0, "above 0, or None")
        for name in ("top_k", "top_p", "min_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ValueError(
                    f"Sampling: {name}={getattr(self, name)} does nothing where the likeliest token is taken; pass "
                    f"`temperature` too, such as 1.0"
                )


def _check(name: str, value: float | int | None, holds: bool, constraint: str) -> None:
    if not holds:
        raise ValueError(f"Sampling: {name}={value} should be {constraint}")


class Generated(NamedTuple):
    """What followed a prompt: tokens, with the one that stopped it if one did, and the logarithm of the probability
    that the model itself, before any `Sampling`, gave to each."""

    tokens: list[int]
    log_probabilities: list[float]
    stopped: bool


def generate(
    model: Any,
    prompts: Sequence[Any],
    max_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    key: PRNGKeyArray | None = None,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer: Any = None,
    logit_function: LogitFunction | None = None,
) -> list[Generated]:
    """Up to `max_tokens` tokens that follow each prompt, until one of `stop_tokens` or the end of a stop string.

    Prompts, lists or arrays of token ids, may differ in length, and are read and continued together. Programs are
    compiled for powers of two of both lengths, and serve all that are shorter.

    `logit_function(logits, tokens, count)` may change the logits of the token after the first `count` of `tokens` (the
    prompt's, then what followed), before a temperature is applied; define it once, for another function is another
    program. To see stop strings takes the `tokenizer`, or whatever else has a `decode(tokens)`.
    """
    results = [Generated([], [], False) for _ in prompts]
    every = 32 if stop_strings else max_tokens
    for parts in stream(
        model,
        prompts,
        max_tokens,
        every=every,
        sampling=sampling,
        key=key,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        logit_function=logit_function,
    ):
        results = [
            Generated(old.tokens + new.tokens, old.log_probabilities + new.log_probabilities, new.stopped)
            for old, new in zip(results, parts, strict=True)
        ]
    return results


def stream(
    model: Any,
    prompts: Sequence[Any],
    max_tokens: int,
    *,
    every: int = 8,
    sampling: Sampling = Sampling(),
    key: PRNGKeyArray | None = None,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer: Any = None,
    logit_function: LogitFunction | None = None,
) -> Iterator[list[Generated]]:
    """As `generate`, with what is new of each prompt's continuation, first after one token, then after `every` more."""
    prompts = _checked_prompts(prompts)
    _check_arguments(max_tokens, every, sampling, key, stop_strings, tokenizer)
    length = _cache_length(model, max(map(len, prompts)), max_tokens)
    rules = _Rules.of(sampling, stop_tokens, key, logit_function)
    watch = [_Watch(len(prompt), stop_strings, tokenizer) for prompt in prompts]
    return _stream(model, prompts, max_tokens, every, length, rules, watch)


def _stream(
    model: Any,
    prompts: Sequence[Int[np.ndarray, "_"]],
    max_tokens: int,
    every: int,
    length: int,
    rules: "_Rules",
    watch: Sequence["_Watch"],
) -> Iterator[list[Generated]]:
    counts = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), _power_of_two(max(map(len, prompts)))), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    in_place = len(prompts) == 1 and _can_be_in_place(model)
    model = nn.in_place(model) if in_place else model
    state, is_known = _start(model, padded, counts, length, rules, in_place=in_place)
    if not is_known:
        raise ValueError("generate: a prompt has a token that is negative or not in the model's vocabulary; check ids")
    made = 1
    while True:
        tokens, log_probabilities, ends, done = jax.device_get(
            (state.tokens, state.log_probabilities, state.counts, state.done)
        )
        rows = zip(watch, tokens, log_probabilities, ends.tolist(), done.tolist(), strict=True)
        yield [each.news(*row) for each, *row in rows]
        stopped = np.array([each.stopped for each in watch])
        if made >= max_tokens or stopped.all():
            return
        if (stopped & ~done).any():
            state = eqx.tree_at(lambda state: state.done, state, jnp.asarray(stopped))
        steps = min(every, max_tokens - made)
        state = _go_on((model, rules, jnp.int32(steps)), state)
        made += steps


def _can_be_in_place(model: Any) -> bool:
    """Whether it is on one CPU, and only calls its layers, as eqzoo's do: others may compute with a weight itself."""
    devices = {device for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array) for device in leaf.devices()}
    is_ours = type(model).__module__.startswith("eqzoo.")
    return is_ours and len(devices) == 1 and all(device.platform == "cpu" for device in devices)


class _Watch:
    """What of one prompt's continuation has been told, and whether it has ended."""

    def __init__(self, start: int, stop_strings: Sequence[str], tokenizer: Any):
        self.start = self.told = start
        self.stop_strings = stop_strings
        self.tokenizer = tokenizer
        self.stopped = False

    def news(
        self,
        tokens: Int[np.ndarray, " length"],
        log_probabilities: Float[np.ndarray, " length"],
        end: int,
        done: bool,
    ) -> Generated:
        if self.stopped:
            return Generated([], [], True)
        cut = self._end_of_stop_string(tokens, end)
        self.stopped = done or cut is not None
        new = slice(self.told, end if cut is None else cut)
        self.told = new.stop
        return Generated(tokens[new].tolist(), log_probabilities[new].tolist(), self.stopped)

    def _end_of_stop_string(self, tokens: Int[np.ndarray, " length"], end: int) -> int | None:
        """After which token the text has one of the strings, if it does."""
        if self.tokenizer is None or not self.stop_strings:
            return None
        has_one = lambda end: any(string in self._text(tokens[self.start : end]) for string in self.stop_strings)
        if not has_one(end):
            return None
        return next(cut for cut in range(self.told + 1, end + 1) if has_one(cut))

    def _text(self, tokens: Int[np.ndarray, " tokens"]) -> str:
        text = self.tokenizer.decode(tokens.tolist())
        return text.decode(errors="replace") if isinstance(text, bytes) else text


def _checked_prompts(prompts: Sequence[Any]) -> list[Int[np.ndarray, "_"]]:
    arrays = [np.asarray(prompt) for prompt in prompts]
    if not arrays:
        raise ValueError("generate: there are no prompts; pass a list of them, each a list of token ids")
    for array in arrays:
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise ValueError(
                f"generate: a prompt is an array of shape {array.shape} and dtype {array.dtype}, expected a list of "
                f"token ids; pass a list of prompts, each as a tokenizer encodes it"
            )
        if not array.size:
            raise ValueError("generate: a prompt is empty; pass at least one token, such as the one that starts a text")
    return arrays


def _check_arguments(
    max_tokens: int,
    every: int,
    sampling: Sampling,
    key: PRNGKeyArray | None,
    stop_strings: Sequence[str],
    tokenizer: Any,
) -> None:
    if max_tokens < 1 or every < 1:
        raise ValueError(f"generate: max_tokens={max_tokens} and every={every} should both be at least 1")
    if sampling.temperature > 0 and key is None:
        raise ValueError("generate: drawing tokens needs a key; pass `key=jax.random.key(0)`, or temperature=0")
    if isinstance(stop_strings, str):
        raise ValueError(f"generate: stop_strings={stop_strings!r} should be a list of strings")
    if stop_strings and tokenizer is None:
        raise ValueError("generate: stop_strings need the tokenizer, to see the text; pass `tokenizer=`")


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _cache_length(model: Any, longest: int, max_tokens: int) -> int:
    """For how many tokens to make the cache: a power of two where the model's context has it."""
    needed = longest + max_tokens
    try:
        eqx.filter_eval_shape(lambda: model.empty_cache(needed))
    except ValueError as error:
        raise ValueError(
            f"generate: {max_tokens} tokens after a prompt of {longest} are too many. {error}. Cut the prompt, or "
            f"pass a smaller max_tokens"
        ) from error
    try:
        eqx.filter_eval_shape(lambda: model.empty_cache(_power_of_two(needed)))
    except ValueError:
        return needed
    return _power_of_two(needed)


class _Rules(eqx.Module):
    """`Sampling`, its numbers as arrays so that others need no other program; what stops; and the key, if any draws."""

    temperature: Float[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None
    repetition_penalty: Float[Array, ""] | None
    stops: Int[Array, " stops"]
    key: PRNGKeyArray | None
    top_k: int | None = eqx.field(static=True)
    logit_function: LogitFunction | None = eqx.field(static=True)

    @staticmethod
    def of(
        sampling: Sampling, stop_tokens: Sequence[int], key: PRNGKeyArray | None, logit_function: LogitFunction | None
    ) -> "_Rules":
        array = lambda number: None if number is None else jnp.float32(number)
        return _Rules(
            array(sampling.temperature or None),
            array(sampling.top_p),
            array(sampling.min_p),
            array(sampling.repetition_penalty),
            jnp.asarray(np.array(stop_tokens, np.int32).reshape(-1)),
            key if sampling.temperature > 0 else None,
            sampling.top_k,
            logit_function,
        )


class _State(eqx.Module):
    """All examples between two steps: `tokens` (prompts too) of which `counts` are there; the last is not yet read."""

    cache: PyTree
    tokens: Int[Array, "batch length"]
    log_probabilities: Float[Array, "batch length"]
    counts: Int[Array, " batch"]
    seen: Bool[Array, "batch vocab"] | None
    done: Bool[Array, " batch"]

    def append(self, logits: Float[Array, "batch vocab"], rules: _Rules) -> "_State":
        """With the next token of each example that isn't done."""
        batch = jnp.arange(len(self.counts))
        choose_token = partial(_choose, rules=rules)
        token, log_probability = _over_batch(choose_token, logits, self.tokens, self.counts, self.seen, batch)
        places = jnp.where(self.done, self.tokens.shape[1], self.counts)  # out of bounds: not written
        return _State(
            cache=self.cache,
            tokens=self.tokens.at[batch, places].set(token, mode="drop"),
            log_probabilities=self.log_probabilities.at[batch, places].set(log_probability, mode="drop"),
            counts=self.counts + ~self.done,
            seen=None if self.seen is None else self.seen.at[batch, token].set(True),
            done=self.done | jnp.any(token[:, None] == rules.stops, axis=1),
        )


def _over_batch(function: Callable[..., Any], *args: Any) -> Any:
    """`jax.vmap`, but for a batch of one, whose products of a matrix and a vector must stay such."""
    if len(args[0]) > 1:
        return jax.vmap(function)(*args)
    alone = jax.tree.map(lambda array: array[0], args)
    return jax.tree.map(lambda array: array[None], function(*alone))


@eqx.filter_jit
def _start(
    model: Any,
    prompts: Int[Array, "batch longest"] | Int[np.ndarray, "batch longest"],
    counts: Int[Array, " batch"] | Int[np.ndarray, " batch"],
    length: int,
    rules: _Rules,
    *,
    in_place: bool,
) -> tuple[_State, Bool[Array, ""]]:
    """Read the prompts, right-padded, and choose the first token after each; whether the vocabulary has all of them."""
    batch, longest = prompts.shape
    size = min(longest, _READ_AT_ONCE)
    cache = jax.tree.map(lambda array: jnp.broadcast_to(array, (batch, *array.shape)), model.empty_cache(length))

    def read(carry, part):
        cache, last = carry
        tokens, start = part
        here = jnp.clip(counts - start, 0, size)
        hidden, cache = _over_batch(
            lambda tokens, cache, count: model.extend(tokens, cache, count=count), tokens, cache, here
        )
        found = hidden[jnp.arange(batch), jnp.clip(here - 1, 0)]
        last = found if last is None else jnp.where((here > 0)[:, None], found, last)
        return (cache, last), None

    parts = prompts.reshape(batch, -1, size).swapaxes(0, 1), jnp.arange(0, longest, size)
    carry, _ = read((cache, None), jax.tree.map(lambda part: part[0], parts))
    if longest > size:
        carry, _ = jax.lax.scan(read, carry, jax.tree.map(lambda part: part[1:], parts))
    cache, last = carry
    cache = nn.in_place(cache) if in_place else cache
    logits = _over_batch(model.logits, last)

    vocab = logits.shape[1]
    is_real = jnp.arange(longest) < counts[:, None]
    seen = None
    if rules.repetition_penalty is not None:
        places = jnp.where(is_real, prompts, vocab)
        seen = jnp.zeros((batch, vocab), bool).at[jnp.arange(batch)[:, None], places].set(True, mode="drop")
    tokens = jnp.zeros((batch, max(length, longest)), jnp.int32).at[:, :longest].set(prompts)
    state = _State(
        cache, tokens, jnp.zeros(tokens.shape, jnp.float32), jnp.asarray(counts), seen, jnp.zeros(batch, bool)
    )
    return state.append(logits, rules), jnp.all(~is_real | (prompts >= 0) & (prompts < vocab))


@eqx.filter_jit(donate="all-except-first")
def _go_on(given: tuple[Any, _Rules, Int[Array, ""]], state: _State) -> _State:
    """Up to some number of steps more, until all are done; what is `given` (a model, rules, the number) is kept."""
    model, rules, steps = given

    def step(carry):
        made, state = carry
        latest = jnp.take_along_axis(state.tokens, state.counts[:, None] - 1, axis=1)
        hidden, cache = _over_batch(model.extend, latest, state.cache)
        logits = _over_batch(model.logits, hidden[:, 0])
        state = eqx.tree_at(lambda state: state.cache, state, cache)
        return made + 1, state.append(logits, rules)

    goes_on = lambda carry: (carry[0] < steps) & ~jnp.all(carry[1].done)
    return jax.lax.while_loop(goes_on, step, (jnp.zeros_like(steps), state))[1]


def _choose(
    logits: Float[Array, " vocab"],
    tokens: Int[Array, " length"],
    count: Int[Array, ""],
    seen: Bool[Array, " vocab"] | None,
    example: Int[Array, ""],
    *,
    rules: _Rules,
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """A token, and the logarithm of its probability in the model's own eyes."""
    logits = logits.astype(jnp.float32)
    scores = _scores(logits, tokens, count, seen, rules)
    if rules.key is None:
        token = jnp.argmax(scores)
    else:
        token = draw(scores, jax.random.fold_in(jax.random.fold_in(rules.key, example), count))
    return token.astype(jnp.int32), logits[token] - jax.nn.logsumexp(logits)


def _scores(
    logits: Float[Array, " vocab"],
    tokens: Int[Array, " length"],
    count: Int[Array, ""],
    seen: Bool[Array, " vocab"] | None,
    rules: _Rules,
) -> Float[Array, " vocab"]:
    if rules.repetition_penalty is not None and seen is not None:
        logits = penalise(logits, seen, rules.repetition_penalty)
    if rules.logit_function is not None:
        logits = rules.logit_function(logits, tokens, count)
    logits = logits if rules.temperature is None else logits / rules.temperature
    logits = logits if rules.top_k is None else keep_top_k(logits, rules.top_k)
    logits = logits if rules.top_p is None else keep_top_p(logits, rules.top_p)
    return logits if rules.min_p is None else keep_min_p(logits, rules.min_p)


def penalise(
    logits: Float[Array, " vocab"], seen: Bool[Array, " vocab"], penalty: Float[Array, ""] | float
) -> Float[Array, " vocab"]:
    """Tokens that were seen become less likely if `penalty` is above one (Keskar et al., 2019)."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Float[Array, " vocab"], k: int) -> Float[Array, " vocab"]:
    """Those of the `k` likeliest tokens; minus infinity for others."""
    # Of the whole result, for which XLA:CPU has a fast program; for the last of it alone, it would sort everything.
    smallest = jnp.min(jax.lax.top_k(logits, min(k, logits.shape[0]))[0])
    return jnp.where(logits < smallest, -jnp.inf, logits)


def keep_top_p(logits: Float[Array, " vocab"], p: Float[Array, ""] | float) -> Float[Array, " vocab"]:
    """Those of the fewest tokens that have a probability of `p` together (Holtzman et al., 2020)."""
    # The least probability such that all greater ones add up to less than `p`, by bisection over the order of floats,
    # which for positive ones is that of their bits: ten times faster than to sort a vocabulary.
    probabilities = jax.nn.softmax(logits)
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        too_low = jnp.sum(jnp.where(bits > middle, probabilities, 0)) >= p
        return jnp.where(too_low, middle, low), jnp.where(too_low, high, middle)

    _, least = jax.lax.fori_loop(0, 31, halve, (jnp.int32(-1), jnp.max(bits)))
    return jnp.where(bits < least, -jnp.inf, logits)


def keep_min_p(logits: Float[Array, " vocab"], p: Float[Array, ""] | float) -> Float[Array, " vocab"]:
    """Those of tokens at least `p` times as likely as the likeliest (Nguyen et al., 2024)."""
    probabilities = jax.nn.softmax(logits)
    return jnp.where(probabilities < p * jnp.max(probabilities), -jnp.inf, logits)


def draw(logits: Float[Array, " vocab"], key: PRNGKeyArray) -> Int[Array, ""]:
    """A token, drawn by its probability; with one random number, where `jax.random.categorical` takes one a token."""
    weights = jnp.exp(logits - jnp.max(logits))
    sums = jnp.where(weights > 0, jnp.cumsum(weights), 0)
    return jnp.argmax(sums > jax.random.uniform(key) * jnp.max(sums))
