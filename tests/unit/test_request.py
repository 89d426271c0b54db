"""Derived sizes of a request and the meaning of its error codes."""

from __future__ import annotations

import numpy as np

from rung.errors import ErrorCode
from tests.scheduling import make_request


def test_sizes_follow_from_prompt_and_limits():
    request = make_request(3, [1, 2, 3], max_tokens=5)
    assert request.num_prompt_tokens == 3
    assert request.max_total_tokens == 8
    np.testing.assert_array_equal(request.token_ids, [1, 2, 3])


def test_a_new_request_is_nowhere():
    request = make_request(3)
    assert request.row == -1
    assert request.scheduled_at_s is None
    assert not request.started


def test_only_what_may_pass_by_itself_is_retryable():
    retryable = {code for code in ErrorCode if code.retryable}
    assert retryable == {ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.INTERNAL, ErrorCode.DEADLINE}
