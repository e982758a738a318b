"""From a kept transcript to what a trial's page shows of it.

Contract: the tokens of an answer are those that were sampled, each with the log-probability that it was sampled at;
whether one trains is what the trial's fate, its advantage and `seq_len` make of it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from harbortrainer.runs.transcript import Place, Transcript, Turn
from harbortrainer.runs.transcript_files import read
from harbortrainer.view.shown_trial import ShownMessage, ShownToken, ShownTurn, TrialEntry, TrialSheet
from harbortrainer.view.token_pieces import TokenPieces, tokenizer_file

NEVER_KEPT = "No transcript of it was kept: what was said in it is not known any more."
FORGOTTEN = "Its transcript is kept no longer: the oldest go first, when they are more than transcripts_mb."


def with_transcript_at(sheet: TrialSheet, folder: Path, place: Place | None, *models: str) -> TrialSheet:
    """A trial's sheet with what was said in it.

    Args:
        sheet: What its line tells.
        folder: Of the run.
        place: Where its line says that its transcript lies; None when none was kept.
        models: Folders or hub ids, whose first tokenizer that is here spells the tokens.
    """
    kept = read(folder, place, sheet.line.trial) if place is not None else None
    if kept is None:
        return replace(sheet, transcript=FORGOTTEN if place else NEVER_KEPT)
    return with_transcript(sheet, kept, TokenPieces(tokenizer_file(*models)))


def with_transcript(sheet: TrialSheet, kept: Transcript, pieces: TokenPieces) -> TrialSheet:
    """A trial's sheet with what was said in it."""
    changes = kept.changed_files or []
    return replace(
        sheet,
        turns=[_turn(turn, sheet, kept, pieces) for turn in kept.turns()],
        verifier_output=kept.verifier_output,
        changed_files=[(change.how, change.path) for change in changes],
        changed_files_total=kept.changed_files_total,
        changed_tools=kept.changed_tools,
        error=kept.error or sheet.error,
        evidence=kept.evidence,
        lost_calls=[call.error for call in kept.lost_calls],
        trial_dir=kept.trial_dir or "",
        transcript="",
    )


def _turn(turn: Turn, sheet: TrialSheet, kept: Transcript, pieces: TokenPieces) -> ShownTurn:
    answer = turn.answer
    own = kept.advantages.get(turn.index)
    return ShownTurn(
        number=turn.number,
        asked=[ShownMessage(message.role, message.text) for message in turn.shown],
        answer=answer.text,
        tokens=(lambda most: _tokens(turn, sheet.line, own, pieces, most)) if answer.token_ids else None,
        spelled=pieces.known,
        mean_logprob=fmean(answer.logprobs) if answer.logprobs else None,
        rewritten=_rewritten(turn.index, kept),
        thinking=answer.thinking or "",
        calls=[(call.name, call.arguments) for call in answer.tool_calls],
        prompt_len=turn.prompt_len,
        sampled_len=answer.sampled_len,
        version=turn.version,
        finish=answer.finish or "",
        took=answer.took,
    )


def _tokens(
    turn: Turn, line: TrialEntry, own: Sequence[float] | None, pieces: TokenPieces, most: int
) -> list[ShownToken]:
    """The first sampled tokens. `own`: their advantages, where these differ from token to token."""
    ids, logprobs = turn.token_ids[:most], turn.logprobs
    return [
        ShownToken(
            text=text,
            logprob=logprobs[place] if place < len(logprobs) else None,
            advantage=own[place] if own is not None and place < len(own) else line.advantage,
            trains=line.trained and turn.trains[place],
            cut=line.trained and not turn.trains[place],
            token_id=ids[place],
        )
        for place, text in enumerate(pieces.texts(ids))
    ]


def _rewritten(index: int, kept: Transcript) -> bool:
    """Whether the answer that was sampled before this one is no part of what it was asked."""
    before = next((at for at in range(index - 1, -1, -1) if kept.messages[at].sampled), None)
    at = kept.messages[index].parent
    while at is not None and at != before:
        at = kept.messages[at].parent
    return before is not None and at is None
