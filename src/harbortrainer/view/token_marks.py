"""The tokens of an answer as coloured text: how likely each was, whether it trains, and in which direction.

Contract: every character comes out of `hostile_text` and is escaped; a page holds at most as many tokens as it is told,
the rest of an answer is plain text. Pure.
"""

import math
from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup, escape

from harbortrainer.view.hostile_text import visible
from harbortrainer.view.shown_trial import ShownToken

MOST_TOKENS = 6000
"""On a page, each with its own figures."""
_LEVELS = (0.9, 0.6, 0.3, 0.1, 0.03, 0.003)
"""Probabilities at which the colour changes, from the likely to the unlikely."""
COLOURS = ("logprob", "advantage")


def level(logprob: float) -> int:
    """0 for a token that was all but certain, to 6 for one that hardly ever comes.

    Example:
        >>> [level(value) for value in (0.0, -0.7, -10.0)]
        [0, 2, 6]
    """
    probability = math.exp(min(0.0, logprob))
    return sum(probability < bound for bound in _LEVELS)


def token_marks(tokens: Sequence[ShownToken], *, colour: str = "logprob") -> Markup:
    """Tokens as text with a colour each; what they are is said when one is pointed at."""
    return Markup("").join(_mark(token, colour) for token in tokens)


def text_of(tokens: Sequence[ShownToken]) -> str:
    """Tokens as plain text."""
    return visible("".join(token.text for token in tokens))


def shares(tokens: Sequence[ShownToken]) -> list[tuple[int, int]]:
    """How many tokens each level has, those that occur."""
    levels = sorted(level(token.logprob) for token in tokens if token.logprob is not None)
    return [(one, len(list(own))) for one, own in groupby(levels)]


def _mark(token: ShownToken, colour: str) -> Markup:
    classes = [_style(token, colour)] + (["untrained"] if token.cut else [])
    return Markup('<span class="t {}" title="{}">{}</span>').format(" ".join(classes), _told(token), _piece(token.text))


def _piece(text: str) -> Markup:
    """A line's end within a token is seen, and still ends the line."""
    return (
        escape(visible(text)).replace("\n", Markup('<i class="nl">↵</i>\n')) if text else Markup('<i class="nl">∅</i>')
    )


def _style(token: ShownToken, colour: str) -> str:
    if colour == "advantage":
        return "a0" if not token.advantage or not token.trains else "up" if token.advantage > 0 else "down"
    return "p0" if token.logprob is None else f"p{level(token.logprob)}"


def _told(token: ShownToken) -> str:
    told = []
    if token.logprob is not None:
        told.append(f"log-probability {token.logprob:.4g} (p {math.exp(min(0.0, token.logprob)):.3g})")
    if token.trains and token.advantage is not None:
        told.append(f"advantage {token.advantage:+.4g}")
    if not token.trains:
        told.append("beyond seq_len, does not train" if token.cut else "does not train")
    return ", ".join([*told, *([f"id {token.token_id}"] if token.token_id is not None else [])])
