"""Changes logits as the rules of their rows say: penalties, bias, allowed and forbidden ids.

All rows that have rules are changed together; the others are neither copied nor looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rung.scheduler.batch import RuledRow, SamplingColumns

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Ids = npt.NDArray[np.integer]

_LARGEST = np.finfo(np.float32).max


def edited_logits(logits: F32, columns: SamplingColumns) -> tuple[I64, F32]:
    """The rows of `logits` [S, vocab_size] that are changed, and a changed copy of them.

    Returns rows [E] i64, ascending, and their logits [E, vocab_size]: finite, or -inf where an id
    must not be chosen. Order: repetition penalty, frequency and presence penalty, bias, then
    everything that forbids. Stop ids of an answer that is too short are not forbidden where a
    grammar allows nothing else.
    """
    rows = columns.edited_rows()
    edited: F32 = logits[rows]
    # A row that is not finite has failed already; what becomes of it here does not matter.
    with np.errstate(over="ignore", invalid="ignore"):
        _edit(edited, rows, columns)
    return rows, edited


def _edit(edited: F32, rows: I64, columns: SamplingColumns) -> None:
    place = {row: index for index, row in enumerate(rows.tolist())}
    if columns.ruled:
        places = [place[row.index] for row in columns.ruled]
        _penalise_repetition(edited, columns.ruled, places)
        _penalise_occurrence(edited, columns.ruled, places)
        _add_bias(edited, columns.ruled, places)
        _keep_allowed(edited, columns.ruled, places)
        words = [
            (at, row.rules.bad_words.banned(row.answer_ids))
            for at, row in zip(places, columns.ruled, strict=True)
            if row.rules.bad_words is not None
        ]
        _ban(edited, words)
    masked: list[int] = []
    if columns.masks is not None:
        masked = [place[row] for row in columns.masks.rows.tolist()]
        _mask(edited, masked, columns.masks.bits)
    # Where a grammar has come to its end, an answer that is too short ends all the same.
    _ban(
        edited,
        [
            (place[row], ids)
            for row, ids in columns.banned_ids
            if place[row] not in masked or _leaves_some(edited[place[row]], ids)
        ],
    )


def _penalise_repetition(edited: F32, ruled: Sequence[RuledRow], places: Sequence[int]) -> None:
    chosen = [(at, row) for at, row in zip(places, ruled, strict=True) if row.rules.reads_prompt]
    if not chosen:
        return
    rows, ids = _pairs((at, np.concatenate([row.prompt_ids, row.answer_ids])) for at, row in chosen)
    penalty = np.ones(len(edited), dtype=np.float32)
    for at, row in chosen:
        penalty[at] = row.rules.repetition_penalty
    penalties = penalty[rows]
    # An id that stands here twice is read before it is written, and written twice with one value.
    values = edited[rows, ids]
    edited[rows, ids] = _within_range(np.where(values > 0, values / penalties, values * penalties))


def _penalise_occurrence(edited: F32, ruled: Sequence[RuledRow], places: Sequence[int]) -> None:
    counted = []
    for at, row in zip(places, ruled, strict=True):
        frequency, presence = row.rules.frequency_penalty, row.rules.presence_penalty
        if (frequency or presence) and len(row.answer_ids):
            occurring, counts = np.unique(row.answer_ids, return_counts=True)
            counted.append((at, occurring, (frequency * counts + presence).astype(np.float32)))
    if counted:
        rows, ids = _pairs((at, ids) for at, ids, _ in counted)
        edited[rows, ids] = _within_range(
            edited[rows, ids] - np.concatenate([part for _, _, part in counted])
        )


def _add_bias(edited: F32, ruled: Sequence[RuledRow], places: Sequence[int]) -> None:
    biased = [(at, row.rules) for at, row in zip(places, ruled, strict=True) if len(row.rules.bias_ids)]
    if biased:
        rows, ids = _pairs((at, rules.bias_ids) for at, rules in biased)
        values = np.concatenate([rules.bias_values for _, rules in biased])
        edited[rows, ids] = _within_range(edited[rows, ids] + values)


def _keep_allowed(edited: F32, ruled: Sequence[RuledRow], places: Sequence[int]) -> None:
    listed = [
        (at, row.rules.allowed_ids)
        for at, row in zip(places, ruled, strict=True)
        if row.rules.allowed_ids is not None
    ]
    if listed:
        rows, ids = _pairs(listed)
        kept = edited[rows, ids]
        edited[[at for at, _ in listed]] = -np.inf
        edited[rows, ids] = kept


def _ban(edited: F32, banned: Sequence[tuple[int, Ids]]) -> None:
    if banned:
        rows, ids = _pairs(banned)
        edited[rows, ids] = -np.inf


def _mask(edited: F32, places: Sequence[int], bits: U32) -> None:
    vocab_size = edited.shape[1]
    # One row at a time, so that a row's logits stay in the cache.
    for at, words in zip(places, bits.astype("<u4", copy=False), strict=True):
        allowed = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
        np.copyto(edited[at], -np.inf, where=~allowed)


def _leaves_some(logits: F32, banned: Ids) -> bool:
    rest = logits.copy()
    rest[banned] = -np.inf
    return bool(rest.max() > -np.inf)


def _pairs(rows: Iterable[tuple[int, Ids]]) -> tuple[I64, I64]:
    """(row, ids) of several rows as one list of (row, id): two columns."""
    rows = list(rows)
    ids = np.concatenate([ids for _, ids in rows]).astype(np.int64)
    at = np.array([at for at, _ in rows], dtype=np.int64)
    return np.repeat(at, [len(ids) for _, ids in rows]), ids


def _within_range(values: F32) -> F32:
    """A logit at the edge of float32 stays finite whatever is done to it."""
    finite: F32 = np.clip(values, -_LARGEST, _LARGEST)
    return finite
