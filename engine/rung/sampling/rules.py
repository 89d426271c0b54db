"""What a request asks for beyond temperature, top-k and top-p: changes to the logits of single ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

_NO_IDS: I32 = np.empty(0, dtype=np.int32)
_NO_VALUES: F32 = np.empty(0, dtype=np.float32)
# Stands for "whatever" before a shorter bad word, and for "nothing yet" before an answer: the two must
# differ, so that a word is not found in an answer that is shorter than the word.
_ANY = -1
_NOTHING = -2


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """Rules of one request, applied in this order. Compared by identity.

    repetition_penalty: divides positive and multiplies negative logits of ids in prompt or answer;
                        1 changes nothing. Source: Keskar et al. 2019, arXiv:1909.05858.
    frequency_penalty:  subtracted per occurrence of an id in the answer.
    presence_penalty:   subtracted once if an id occurs in the answer.
    bias_ids, bias_values [n]: added; ids are distinct.
    allowed_ids [n]:    only these may be chosen; None: all.
    bad_words:          sequences of ids, none empty, that the answer must not contain.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias_ids: I32 = field(default_factory=lambda: _NO_IDS)
    bias_values: F32 = field(default_factory=lambda: _NO_VALUES)
    allowed_ids: I32 | None = None
    bad_words: BadWords | None = None

    @property
    def reads_prompt(self) -> bool:
        """Whether the ids of the prompt matter."""
        return self.repetition_penalty != 1.0

    @property
    def reads_answer(self) -> bool:
        """Whether the ids of the answer so far matter."""
        return (
            self.reads_prompt
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.bad_words is not None
        )

    @property
    def changes_nothing(self) -> bool:
        """Whether a request with these rules gets what one without any gets."""
        return not self.reads_answer and len(self.bias_ids) == 0 and self.allowed_ids is None


class BadWords:
    """Sequences of ids, of which the last id is forbidden wherever all before it have just been said."""

    def __init__(self, words: Sequence[I32]) -> None:
        self._longest = max(len(word) for word in words) - 1
        # Words ahead of their last id, aligned at the end.
        self._heads = np.full((len(words), self._longest), _ANY, dtype=np.int32)
        for head, word in zip(self._heads, words, strict=True):
            head[self._longest - (len(word) - 1) :] = word[:-1]
        self._last_ids = np.array([word[-1] for word in words], dtype=np.int32)

    def banned(self, answer_ids: I32) -> I32:
        """Ids that would complete a word after `answer_ids` [n]."""
        tail = np.full(self._longest, _NOTHING, dtype=np.int32)
        num_known = min(len(answer_ids), self._longest)
        tail[self._longest - num_known :] = answer_ids[len(answer_ids) - num_known :]
        completes = ((self._heads == tail) | (self._heads == _ANY)).all(axis=1)
        banned: I32 = self._last_ids[completes]
        return banned
