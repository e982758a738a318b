"""A trial turn by turn: every sampled token with its figures, the terminal, the verifier, and what was changed."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from view_runs import eval_folder, run_folder, trial_row

from harbortrainer.runs.trace_transcript import transcript_of
from harbortrainer.runs.transcript import Transcript
from harbortrainer.view.folder_kind import open_store
from harbortrainer.view.web_app import Site

SCREEN = "New Terminal Output:\n\x1b[31m$ ls\nREADME<script>" + "\n" * 38 + "Sure?\n\n"
WORDS = ["<unk>", "say", "ls", "cat", "README", "done", "<|end|>", "\x07bell"]


def answer(ids: list[int], parent: int, **said: object) -> dict[str, object]:
    message = {"role": "assistant", "content": " ".join(WORDS[token] for token in ids)}
    logprobs = [-0.01 * 10**place for place in range(len(ids))]
    whole = {"parent": parent, "message": message, "sampled": True, "token_ids": [1, *ids], "logprobs": logprobs}
    return whole | {"mask": [False, *[True] * len(ids)]} | said


def kept(trial: str, *, seq_len: int | None = None, **record: object) -> Transcript:
    trace = {
        "id": "abc",
        "nodes": [
            {"message": {"role": "user", "content": "Do it. " * 300}, "token_ids": [1, 1], "mask": [False] * 2},
            answer([2, 6], 0),
            {"parent": 1, "message": {"role": "user", "content": SCREEN}, "token_ids": [1, 1], "mask": [False] * 2},
            answer([3, 4, 7], 2),
        ],
        "calls": [
            {"node": 3, "finish_reason": "length", "time": {"start": 1.0, "end": 3.5}},
            {"node": None, "error": {"type": "Overloaded", "message": "come back"}},
        ],
        "info": {"harbor": {"trial_name": trial, "verifier_output": "2 passed\x1b[0m"} | record},
    }
    return transcript_of(trace, versions={1: 0, 3: 1}, seq_len=seq_len)


def put_transcript(folder: Path, name: str, transcript: Transcript) -> list[int]:
    member = transcript.packed()
    file = folder / f"{name}.jsonl.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(member)
    return [0, len(member)]


@pytest.fixture
def folder(tmp_path) -> Path:
    changed = {
        "changed_files": [{"path": "/app/<b>", "how": "added"}],
        "changed_files_total": 3,
        "changed_tools": ["bash"],
    }
    at = put_transcript(tmp_path / "kept", "step_1", kept("t__1", seq_len=9, **changed))
    run = run_folder(tmp_path / "run", [trial_row("t__1", transcript=at, advantage=-0.25, reward=0.0)])
    (tmp_path / "kept").rename(run / "transcripts")
    (run / "model").mkdir()
    model = WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>")
    Tokenizer(model).save(str(run / "model/tokenizer.json"))
    return run


def page_of(folder: Path, address: str = "/trial/t__1") -> str:
    found = TestClient(Site(open_store(folder)).app(), base_url="http://localhost").get(address)
    assert found.status_code == 200
    return found.text


def tokens_of(page: str) -> list[tuple[str, str, str]]:
    """Class, title and text of every token."""
    found = re.findall(r'<span class="t (\w[^"]*)" title="([^"]+)">(.*?)</span>', page, re.DOTALL)
    return [(style, title, unescape(text)) for style, title, text in found]


def test_every_sampled_token_is_shown_with_what_it_was_sampled_at(folder) -> None:
    tokens = tokens_of(page_of(folder))
    assert [text for _, _, text in tokens] == ["ls", "<|end|>", "cat", "README", "‹BEL›bell"]
    assert tokens[0][:2] == ("p0", "log-probability -0.01 (p 0.99), advantage -0.25, id 2")
    assert tokens[1][:2] == ("p0", "log-probability -0.1 (p 0.905), advantage -0.25, id 6")
    # The second answer begins after 2 + 3 + 2 + 1 = 8 tokens: of seq_len 9 one of its own is left.
    assert [style for style, _, _ in tokens[3:]] == ["p0 untrained", "p2 untrained"]
    assert "beyond seq_len" in tokens[4][1]


def test_by_advantage_every_token_that_trained_has_its_direction(folder) -> None:
    styles = [style for style, _, _ in tokens_of(page_of(folder, "/trial/t__1?colour=advantage"))]
    assert styles == ["down", "down", "down", "a0 untrained", "a0 untrained"]


def test_a_turn_shows_the_terminal_and_how_it_was_answered(folder) -> None:
    page = page_of(folder)
    words = " ".join(unescape(re.sub(r"<[^>]+>", " ", page.split("<main>")[1])).split())
    assert (
        'class="screen">New Terminal Output:\n‹ESC›[31m$ ls\nREADME&lt;script&gt;\n⋮ 37 empty lines\nSure?</pre>'
        in page
    )
    assert "3 tokens after 8" in words and "ended by length" in words and "2.5 s" in words
    assert "2 passed‹ESC›[0m" in words and "Overloaded: come back" in words
    assert "added /app/<b>" in words and "2 more files" in words and "Tools that a verifier is run with: bash" in words


def test_a_trial_that_did_not_train_has_its_tokens_without_an_advantage(tmp_path, folder) -> None:
    row = json.loads((folder / "rollouts/step_1.jsonl").read_text())
    row |= {"advantage": None, "not_trained": "no signal in its group"}
    (folder / "rollouts/step_1.jsonl").write_text(json.dumps(row) + "\n")
    tokens = tokens_of(page_of(folder))
    assert len(tokens) == 5
    assert all("does not train" in title and "advantage" not in title for _, title, _ in tokens)


def test_without_a_tokenizer_tokens_are_their_numbers(folder) -> None:
    (folder / "model/tokenizer.json").unlink()
    assert [text for _, _, text in tokens_of(page_of(folder))] == ["2·", "6·", "3·", "4·", "7·"]


@pytest.mark.parametrize("fate", ["gone", "torn", "another's"])
def test_a_transcript_that_is_kept_no_longer_is_told(folder, fate: str) -> None:
    file = folder / "transcripts/step_1.jsonl.gz"
    if fate == "gone":
        file.unlink()
    else:
        file.write_bytes(kept("other").packed() if fate == "another's" else file.read_bytes()[:40])
    assert "Its transcript is kept no longer" in page_of(folder)


def test_a_group_shows_what_each_said_in_each_turn(folder) -> None:
    page = page_of(folder, "/group/group1")
    assert "<pre>ls &lt;|end|&gt;</pre>" in page and "<pre>cat README ‹BEL›bell</pre>" in page


def test_a_long_trial_is_shown_by_pages(folder) -> None:
    whole = kept("t__1")
    nodes = [whole.messages[0]]
    for turn in range(30):
        nodes.append(whole.messages[1].model_copy(update={"parent": len(nodes) - 1, "text": f"answer {turn + 1}"}))
    long = whole.model_copy(update={"messages": nodes})
    at = put_transcript(folder / "transcripts", "step_1", long)
    row = json.loads((folder / "rollouts/step_1.jsonl").read_text()) | {"transcript": at}
    (folder / "rollouts/step_1.jsonl").write_text(json.dumps(row) + "\n")
    assert re.findall(r'id="turn-(\d+)"', page_of(folder, "/trial/t__1?page=3")) == ["25", "26", "27", "28", "29", "30"]
    assert "No such turn" in page_of(folder, "/trial/t__1?page=9")


def test_an_evaluation_shows_its_transcripts_too(tmp_path) -> None:
    row = {"task": "a", "task_key": "k", "attempt": 0, "trial": "t__1", "outcome": "completed", "reward": 1.0}
    folder = eval_folder(tmp_path / "eval", [row])
    at = put_transcript(folder, "transcripts", kept("t__1"))
    (folder / "trials.jsonl").write_text(json.dumps(row | {"transcript": at}) + "\n")
    assert len(tokens_of(page_of(folder))) == 5
