"""Turns of a trial's page, from its saved transcript.

Contract: the tokens of an answer are the sampled tokens, each with its log-probability at sampling. Whether a token is
trained on follows from the trial's row and `seq_len`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from harbortrainer.runs.transcript import Place, Transcript, Turn
from harbortrainer.runs.transcript_files import read_transcript
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.trials.plain_format import LOOP_PROMPT, SYSTEM_PROMPT
from harbortrainer.view.token_decoder import TokenDecoder, tokenizer_file
from harbortrainer.view.trial_view import MessageView, TokenView, TrialDetail, TurnDetail

NO_TRANSCRIPT = "No transcript of this trial was saved."
TRANSCRIPT_DELETED = (
    "The transcript of this trial was deleted. The oldest transcripts are deleted when all exceed transcripts_mb."
)


def add_saved_transcript(detail: TrialDetail, folder: Path, place: Place | None, *models: str) -> TrialDetail:
    """Read a trial's transcript and add its turns.

    Args:
        detail: The trial, as its row describes it.
        folder: The run folder.
        place: Location of the transcript; None if none was saved.
        models: Folders or hub ids; the first one with a local tokenizer decodes the tokens.
    """
    transcript = read_transcript(folder, place, detail.row.trial) if place is not None else None
    if transcript is None:
        return replace(detail, transcript=TRANSCRIPT_DELETED if place else NO_TRANSCRIPT)
    return add_transcript(detail, transcript, TokenDecoder(tokenizer_file(*models)))


def add_transcript(detail: TrialDetail, transcript: Transcript, decoder: TokenDecoder) -> TrialDetail:
    """Add the turns of a transcript to a trial."""
    return replace(
        detail,
        turns=[_turn(turn, detail, transcript, decoder) for turn in transcript.turns()],
        verifier_output=transcript.verifier_output,
        changed_files=transcript.changed_files or [],
        changed_files_total=transcript.changed_files_total,
        changed_tools=transcript.changed_tools,
        error=transcript.error or detail.error,
        evidence=transcript.evidence,
        failed_calls=[call.error for call in transcript.lost_calls],
        trial_dir=transcript.trial_dir or "",
        transcript="",
    )


def _turn(turn: Turn, detail: TrialDetail, transcript: Transcript, decoder: TokenDecoder) -> TurnDetail:
    answer = turn.answer
    advantages = transcript.advantages.get(turn.index)
    return TurnDetail(
        number=turn.number,
        prompt=[MessageView(message.role, message.text) for message in turn.shown],
        answer=answer.text,
        tokens=(lambda limit: _tokens(turn, detail.row, advantages, decoder, limit)) if answer.token_ids else None,
        has_text=decoder.known,
        mean_logprob=fmean(answer.logprobs) if answer.logprobs else None,
        rewritten=_rewritten(turn.index, transcript),
        thinking=answer.thinking or "",
        calls=[(call.name, call.arguments) for call in answer.tool_calls],
        prompt_len=turn.prompt_len,
        sampled_len=answer.sampled_len,
        version=turn.version,
        finish=answer.finish or "",
        plain=transcript.messages[0].text in (SYSTEM_PROMPT, LOOP_PROMPT),
        took=answer.took,
    )


def _tokens(
    turn: Turn, row: TrialRow, advantages: Sequence[float] | None, decoder: TokenDecoder, limit: int
) -> list[TokenView]:
    """Return the first `limit` sampled tokens. `advantages` are per token, None for the row's."""
    ids, logprobs = turn.token_ids[:limit], turn.logprobs
    return [
        TokenView(
            text=text,
            logprob=logprobs[index] if index < len(logprobs) else None,
            advantage=advantages[index] if advantages is not None and index < len(advantages) else row.advantage,
            trains=row.trained and turn.trains[index],
            beyond_seq_len=row.trained and not turn.trains[index],
            token_id=ids[index],
        )
        for index, text in enumerate(decoder.texts(ids))
    ]


def _rewritten(index: int, transcript: Transcript) -> bool:
    """Return whether this answer's history lacks the previous sampled answer."""
    before = next((at for at in range(index - 1, -1, -1) if transcript.messages[at].sampled), None)
    at = transcript.messages[index].parent
    while at is not None and at != before:
        at = transcript.messages[at].parent
    return before is not None and at is None
