"""Good trials of a run as training sequences, with the sampled tokens; nothing is re-tokenized.

Invariant: only sampled tokens are learned, each once, even if several branches of a trial share it. Answers that were
cut off are not learned. The trained model must have the same tokenizer as the model that sampled them.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harbortrainer.errors import UserError
from harbortrainer.runs.good_trials import GoodTrial, good_trials, is_cut
from harbortrainer.runs.provenance import base_policy, base_policy_files, model_fingerprints, named_model
from harbortrainer.warmup.encoding import Encoded

TOKENIZER = "tokenizer.json"
WITHOUT_TOKENS = "without token ids from the model's server"


def encoded_trials(run: Path, *, min_reward: float, left_out: Counter[str]) -> list[Encoded]:
    """Return the sequences of a run's good trials. Raises `UserError` if there is none."""
    found = [
        sequence
        for trial in good_trials(run, min_reward=min_reward, left_out=left_out)
        for sequence in sequences_of(trial, left_out)
    ]
    if not found:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common()) or "it has no trials"
        raise UserError(f"no good trials in this run: {reasons}", where=str(run), do="lower warmup.min_reward")
    return found


def sequences_of(trial: GoodTrial, left_out: Counter[str]) -> Iterator[Encoded]:
    """Yield a sequence per branch; an answer shared by branches is learned only in the first."""
    learned: set[int] = set()
    for path in trial.branches():
        if not all(message.token_ids for message in path):
            left_out[WITHOUT_TOKENS] += 1
            continue
        ids = [token for message in path for token in message.token_ids]
        wanted = [id(message) not in learned and not is_cut(message) for message in path]
        answer = [own and want for message, want in zip(path, wanted, strict=True) for own in message.mask]
        learned |= {id(message) for message in path}
        if any(answer):
            yield Encoded(ids, answer)


def model_for(run: Path, requested: str | None) -> str:
    """Return the model to train: `requested`, or else the run's base policy.

    Raises:
        UserError: The model has another tokenizer than the run's, or the run's model is unknown.
    """
    if requested is None:
        return base_policy(run)
    played = named_model(run)
    recorded = base_policy_files(run) or model_fingerprints(played)
    if requested != played and recorded.get(TOKENIZER, played) != model_fingerprints(requested).get(
        TOKENIZER, requested
    ):
        what = f"{requested} has another tokenizer than the model of this run"
        do = "remove warmup.model, or write a dataset with `harbortrainer export RUN --sft FILE`"
        raise UserError(what, where="warmup.model", do=do)
    return requested
