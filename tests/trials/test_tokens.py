"""Conversion of turns to and from Harbor's rollout_details."""

from typing import cast

import pytest
from harbor.models.agent.rollout_detail import RolloutDetail

from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.record import TurnTokens
from harbortrainer.trials.tokens import to_rollout_details, turns_from_rollout_details

TURNS = [
    TurnTokens(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5]),
    TurnTokens(prompt_ids=[1, 2, 3, 4], completion_ids=[5, 6], logprobs=[-0.1, -0.2]),
]


def test_turns_round_trip_as_rollout_details():
    details = to_rollout_details(TURNS)
    assert details is not None
    assert turns_from_rollout_details(details) == TURNS
    assert to_rollout_details([]) is None


@pytest.mark.parametrize("missing", ["prompt_token_ids", "completion_token_ids", "logprobs"])
def test_list_missing_one_turn_is_an_error(missing):
    columns = {"prompt_token_ids": [[1], [1, 2]], "completion_token_ids": [[2], [3]], "logprobs": [[-1.0], [-1.0]]}
    columns[missing].pop(0)
    with pytest.raises(TokensMissingError):
        turns_from_rollout_details([cast(RolloutDetail, columns)])
