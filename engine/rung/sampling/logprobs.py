"""Log-probabilities of the model's own distribution: before temperature, filters and bans."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rung.sampling.filters import ranked_head
from rung.scheduler.batch import LogprobRow

F32 = npt.NDArray[np.float32]

_LOWEST = float(np.finfo(np.float32).min)


def logprob_row(logits: F32, token_id: int, num_top: int) -> LogprobRow:
    """Log-softmax of one row of finite logits [vocab] at the chosen id and the `num_top` likeliest.

    Accumulates in float64. Every value is finite, also where a logit lies so far below the
    largest that float32 could not hold the difference.
    """
    wide = logits.astype(np.float64)
    peak = wide.max()
    with np.errstate(under="ignore"):
        log_total = peak + np.log(np.exp(wide - peak).sum())
    top_ids = ranked_head(logits, num_top) if num_top > 0 else np.empty(0, dtype=np.int64)
    return LogprobRow(
        chosen=max(float(wide[token_id] - log_total), _LOWEST),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=np.maximum(wide[top_ids] - log_total, _LOWEST).astype(np.float32),
    )
