"""How a token is chosen, once more and as plainly as possible: lists, dicts and floats, one row at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from rung.sampling.rules import BadWords, TokenRules


@dataclass(frozen=True)
class PlainRules:
    """Rules on single ids as plain values."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def built(self) -> TokenRules:
        """The same rules as the product has them."""
        words = [np.array(word, dtype=np.int32) for word in self.bad_words]
        return TokenRules(
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            bias_ids=np.array(list(self.bias), dtype=np.int32),
            bias_values=np.array(list(self.bias.values()), dtype=np.float32),
            allowed_ids=None if self.allowed_ids is None else np.array(self.allowed_ids, dtype=np.int32),
            bad_words=BadWords(words) if words else None,
        )


def edit(
    logits: Sequence[float],
    rules: PlainRules,
    prompt: Sequence[int],
    answer: Sequence[int],
    banned: Collection[int] = (),
) -> list[float]:
    """The logits after the rules; -inf where an id must not be chosen."""
    counts = Counter(answer)
    edited = []
    for token, value in enumerate(logits):
        if token in counts or token in prompt:
            value = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        if token in counts:
            value -= rules.frequency_penalty * counts[token] + rules.presence_penalty
        value += rules.bias.get(token, 0.0)
        if token in banned or (rules.allowed_ids is not None and token not in rules.allowed_ids):
            value = -math.inf
        for *head, last in rules.bad_words:
            if token == last and list(answer)[len(answer) - len(head) :] == head and len(answer) >= len(head):
                value = -math.inf
        edited.append(value)
    return edited


def distribution(
    logits: Sequence[float],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> dict[int, float]:
    """Probability of each id that may be drawn."""
    peak = max(logits)
    weights = {
        token: math.exp((value - peak) / temperature)
        for token, value in enumerate(logits)
        if value != -math.inf
    }
    weights = _head(weights, lambda token: -weights[token], most=top_k or len(weights))
    weights = _head(weights, lambda token: -weights[token], share=top_p)
    weights = {token: weight for token, weight in weights.items() if weight >= min_p}
    total = sum(weights.values())
    shares = {token: weight / total for token, weight in weights.items() if weight > 0}
    entropy = -sum(share * math.log(share) for share in shares.values())
    weights = _head(shares, lambda token: abs(-math.log(shares[token]) - entropy), share=typical_p)
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _head(
    weights: dict[int, float],
    key: Callable[[int], float],
    *,
    most: int | None = None,
    share: float = 1.0,
) -> dict[int, float]:
    """The first tokens by `key`: `most`, or as many as it takes to reach a share of the weights."""
    kept: dict[int, float] = {}
    total = sum(weights.values())
    for token in sorted(weights, key=lambda token: (key(token), token)):
        if most is not None and len(kept) == most:
            break
        kept[token] = weights[token]
        if share < 1.0 and sum(kept.values()) / total >= share - 1e-12:
            break
    return kept
