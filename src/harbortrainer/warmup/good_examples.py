"""Good trials of a run as sequences to learn: the tokens that were sampled, not their text tokenized again.

Invariant: what is learned of a sequence is what the policy sampled there, each token once, also where branches of one
trial share it. The model that learns must read tokens as the one that played did.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.runs.good_trials import GoodTrial, good_trials
from harbortrainer.runs.ingredients import weights_of
from harbortrainer.runs.starting_model import files_of_start, named_model, starting_model
from harbortrainer.warmup.encoding import Encoded

TOKENIZER = "tokenizer.json"
WITHOUT_TOKENS = "without tokens (the model's server told none)"


def encoded_trials(run: Path, *, min_reward: float, left_out: Counter[str]) -> list[Encoded]:
    """The sequences of a run's good trials. Raises `UserError` when there is none."""
    found = [
        sequence
        for trial in good_trials(run, min_reward=min_reward, left_out=left_out)
        for sequence in sequences_of(trial, left_out)
    ]
    if not found:
        reasons = ", ".join(f"{count} {why}" for why, count in left_out.most_common()) or "there is none"
        raise UserError(f"no trial of this run is good: {reasons}", where=str(run), do="lower warmup.min_reward")
    return found


def sequences_of(trial: GoodTrial, left_out: Counter[str]) -> Iterator[Encoded]:
    """One sequence a branch; an answer that branches share is learned with the first of them."""
    learned: set[int] = set()
    for path in trial.branches():
        if not all(message.token_ids for message in path):
            left_out[WITHOUT_TOKENS] += 1
            continue
        ids = [token for message in path for token in message.token_ids]
        answer = [own and id(message) not in learned for message in path for own in message.mask]
        learned |= {id(message) for message in path}
        if any(answer):
            yield Encoded(ids, answer)


def model_for(run: Path, asked: str | None) -> str:
    """The model that learns: the one that was asked for, else the one that the run started from.

    Raises:
        UserError: It does not read tokens as the run's did, or nobody says which it was.
    """
    if asked is None:
        return starting_model(run)
    played = named_model(run)
    recorded = files_of_start(run) or weights_of(played)
    if asked != played and recorded.get(TOKENIZER, played) != weights_of(asked).get(TOKENIZER, asked):
        what = f"{asked} has another tokenizer than the model that played this run"
        do = "leave the model out, or write a dataset with `harbortrainer export RUN --sft FILE`"
        raise UserError(what, where="warmup.model", do=do)
    return asked
