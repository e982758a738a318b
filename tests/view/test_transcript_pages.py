"""Transcripts on the pages: tokens, terminal, verifier output and changed files."""

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
from harbortrainer.trials.plain_format import LOOP_PROMPT
from harbortrainer.view.run_folders import open_store
from harbortrainer.view.server import Site
from harbortrainer.view.trial_page import diff_lines

SCREEN = "New Terminal Output:\n\x1b[31m$ ls\nREADME<script>" + "\n" * 38 + "Sure?\n\n"
WORDS = ["<unk>", "say", "ls", "cat", "README", "done", "<|end|>", "\x07bell"]


def answer_node(ids: list[int], parent: int, **fields: object) -> dict[str, object]:
    message = {"role": "assistant", "content": " ".join(WORDS[token] for token in ids)}
    logprobs = [-0.01 * 10**place for place in range(len(ids))]
    node = {"parent": parent, "message": message, "sampled": True, "token_ids": [1, *ids], "logprobs": logprobs}
    return node | {"mask": [False, *[True] * len(ids)]} | fields


def make_transcript(trial: str, *, seq_len: int | None = None, **record: object) -> Transcript:
    trace = {
        "id": "abc",
        "nodes": [
            {"message": {"role": "user", "content": "Do it. " * 300}, "token_ids": [1, 1], "mask": [False] * 2},
            answer_node([2, 6], 0),
            {"parent": 1, "message": {"role": "user", "content": SCREEN}, "token_ids": [1, 1], "mask": [False] * 2},
            answer_node([3, 4, 7], 2),
        ],
        "calls": [
            {"node": 3, "finish_reason": "length", "time": {"start": 1.0, "end": 3.5}},
            {"node": None, "error": {"type": "Overloaded", "message": "come back"}},
        ],
        "info": {"harbor": {"trial_name": trial, "verifier_output": "2 passed\x1b[0m"} | record},
    }
    return transcript_of(trace, versions={1: 0, 3: 1}, seq_len=seq_len)


def write_transcript(folder: Path, name: str, transcript: Transcript) -> list[int]:
    """Write a file with one transcript, and return the offset and length for a row's `transcript` field."""
    content = transcript.packed()
    file = folder / f"{name}.jsonl.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return [0, len(content)]


@pytest.fixture
def folder(tmp_path) -> Path:
    changes = {
        "changed_files": [
            {"path": "/app/<b>", "how": "added", "size": 12},
            {"path": "/app/x\x1b", "how": "changed", "size": 9, "before": "a\nb\nc\n", "after": "a\n<i>\u202e\nc\nd\n"},
        ],
        "changed_files_total": 3,
        "changed_tools": ["bash"],
    }
    location = write_transcript(tmp_path / "transcripts", "step_1", make_transcript("t__1", seq_len=9, **changes))
    run = run_folder(tmp_path / "run", [trial_row("t__1", transcript=location, advantage=-0.25, reward=0.0)])
    (tmp_path / "transcripts").rename(run / "transcripts")
    (run / "model").mkdir()
    model = WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>")
    Tokenizer(model).save(str(run / "model/tokenizer.json"))
    return run


def page_html(folder: Path, path: str = "/trial/t__1") -> str:
    response = TestClient(Site(open_store(folder)).app(), base_url="http://localhost").get(path)
    assert response.status_code == 200
    return response.text


def parse_tokens(page: str) -> list[tuple[str, str, str]]:
    """Return class, tooltip and text of every token."""
    tokens = re.findall(r'<span class="t (\w[^"]*)" title="([^"]+)">(.*?)</span>', page, re.DOTALL)
    return [(style, title, unescape(text)) for style, title, text in tokens]


def test_sampled_tokens_are_shown_with_log_probabilities(folder) -> None:
    tokens = parse_tokens(page_html(folder))
    assert [text for _, _, text in tokens] == ["ls", "<|end|>", "cat", "README", "‹BEL›bell"]
    assert tokens[0][:2] == ("p0", "log-probability -0.01 (p 0.99), advantage -0.25, id 2")
    assert tokens[1][:2] == ("p0", "log-probability -0.1 (p 0.905), advantage -0.25, id 6")
    # The second answer starts after 2 + 3 + 2 + 1 = 8 tokens, so seq_len 9 includes only one of its tokens.
    assert [style for style, _, _ in tokens[3:]] == ["p0 untrained", "p2 untrained"]
    assert "beyond seq_len" in tokens[4][1]


def test_trained_tokens_are_coloured_by_advantage_sign(folder) -> None:
    styles = [style for style, _, _ in parse_tokens(page_html(folder, "/trial/t__1?colour=advantage"))]
    assert styles == ["down", "down", "down", "a0 untrained", "a0 untrained"]


def test_turn_shows_terminal_and_answer(folder) -> None:
    page = page_html(folder)
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", page.split("<main>")[1])).split())
    assert (
        'class="screen">New Terminal Output:\n‹ESC›[31m$ ls\nREADME&lt;script&gt;\n⋮ 37 empty lines\nSure?</pre>'
        in page
    )
    assert "prompt 8 tokens sampled 3" in text and "finish reason: length" in text and "2.5 s" in text
    assert "2 passed‹ESC›[0m" in text and "Overloaded: come back" in text
    assert "added /app/<b> 12 bytes" in text and "1 more file not shown" in text and "changed by the agent bash" in text


def visible_text(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page.split("<main>")[1])).split())


def rewrite_transcript(folder: Path, transcript: Transcript, **fields: object) -> None:
    location = write_transcript(folder / "transcripts", "step_1", transcript)
    row = json.loads((folder / "rollouts/step_1.jsonl").read_text()) | {"transcript": location} | fields
    (folder / "rollouts/step_1.jsonl").write_text(json.dumps(row) + "\n")


def test_answer_is_shown_as_commands_with_the_screen_after(folder) -> None:
    made = make_transcript("t__1")
    answer = json.dumps(
        {"analysis": "<i>sort</i>", "commands": [{"keystrokes": "sort <a\x1b\n"}], "task_complete": True}
    )
    messages = [message.model_copy(update={"text": answer} if message.sampled else {}) for message in made.messages]
    rewrite_transcript(folder, made.model_copy(update={"messages": messages}))
    page = page_html(folder)
    turns = page.split('<article class="turn"')[1:]
    assert '<pre class="command">sort &lt;a‹ESC›\n</pre>' in turns[0] and "&lt;i&gt;sort&lt;/i&gt;" in turns[0]
    assert turns[0].index("Declares the task complete") < turns[0].index("raw answer") < turns[0].index("screen after")
    assert "README&lt;script&gt;" in turns[0] and "README&lt;script&gt;" not in turns[1]
    assert page.count('<details class="raw">') == 2 and page.count('<details class="raw" open>') == 0
    opened = page_html(folder, "/trial/t__1?raw=yes")
    assert opened.count('<details class="raw" open>') == 2


def test_answer_in_an_unknown_format_is_open(folder) -> None:
    assert page_html(folder).count('<details class="raw" open>') == 2


def test_page_begins_with_reward_verifier_files_and_instruction(folder) -> None:
    text = visible_text(page_html(folder))
    reason = "Reward 0 The agent ended the trial. The verifier gave that state 0."
    places = [
        text.index(part) for part in (reason, "Verifier output", "Files changed", "Instruction Do it. Do it.", "Turns")
    ]
    assert places == sorted(places)


def test_long_verifier_output_begins_with_its_last_lines(folder) -> None:
    output = "\n".join(f"line {number}" for number in range(60))
    rewrite_transcript(folder, make_transcript("t__1", verifier_output=output))
    page = page_html(folder)
    assert (
        page.index("line 59") < page.index("the lines before") < page.index("line 34</pre>") < page.index("Instruction")
    )
    assert '<pre class="screen">line 35\n' in page


@pytest.mark.parametrize(
    ("outcome", "reward", "expected"),
    [
        ("turn_limit", 0.25, "The agent used all of its turns. The verifier gave that state 0.25."),
        ("self_inflicted", 0.0, "Reward 0 without the verifier. The agent destroyed its own sandbox"),
        ("sandbox_error", None, "No reward. The sandbox failed."),
        ("<new>", None, "No reward. The trial ended with the outcome <new>."),
    ],
)
def test_reward_has_its_reason(folder, outcome: str, reward: float | None, expected: str) -> None:
    rewrite_transcript(folder, make_transcript("t__1"), outcome=outcome, reward=reward)
    assert expected in visible_text(page_html(folder))


def test_untrained_trial_has_tokens_without_advantage(tmp_path, folder) -> None:
    row = json.loads((folder / "rollouts/step_1.jsonl").read_text())
    row |= {"advantage": None, "not_trained": "no signal in its group"}
    (folder / "rollouts/step_1.jsonl").write_text(json.dumps(row) + "\n")
    tokens = parse_tokens(page_html(folder))
    assert len(tokens) == 5
    assert all("not trained on" in title and "advantage" not in title for _, title, _ in tokens)


def test_tokens_are_shown_as_ids_without_a_tokenizer(folder) -> None:
    (folder / "model/tokenizer.json").unlink()
    assert [text for _, _, text in parse_tokens(page_html(folder))] == ["2·", "6·", "3·", "4·", "7·"]


@pytest.mark.parametrize("defect", ["missing", "cut off", "other trial"])
def test_missing_transcript_is_reported(folder, defect: str) -> None:
    file = folder / "transcripts/step_1.jsonl.gz"
    if defect == "missing":
        file.unlink()
    else:
        file.write_bytes(make_transcript("other").packed() if defect == "other trial" else file.read_bytes()[:40])
    assert "The transcript of this trial was deleted" in page_html(folder)


def test_group_page_shows_answers_by_turn(folder) -> None:
    page = page_html(folder, "/group/group1")
    assert '<pre class="command">ls &lt;|end|&gt;</pre>' in page
    assert '<pre class="command">cat README ‹BEL›bell</pre>' in page


def test_long_trial_is_paged(folder) -> None:
    transcript = make_transcript("t__1")
    nodes = [transcript.messages[0]]
    for turn in range(30):
        nodes.append(transcript.messages[1].model_copy(update={"parent": len(nodes) - 1, "text": f"answer {turn + 1}"}))
    long_transcript = transcript.model_copy(update={"messages": nodes})
    location = write_transcript(folder / "transcripts", "step_1", long_transcript)
    row = json.loads((folder / "rollouts/step_1.jsonl").read_text()) | {"transcript": location}
    (folder / "rollouts/step_1.jsonl").write_text(json.dumps(row) + "\n")
    turns = re.findall(r'id="turn-(\d+)"', page_html(folder, "/trial/t__1?page=3"))
    assert turns == ["25", "26", "27", "28", "29", "30"]
    assert "No such turn" in page_html(folder, "/trial/t__1?page=9")


def test_evaluation_shows_transcripts(tmp_path) -> None:
    row = {"task": "a", "task_key": "k", "attempt": 0, "trial": "t__1", "outcome": "completed", "reward": 1.0}
    folder = eval_folder(tmp_path / "eval", [row])
    location = write_transcript(folder, "transcripts", make_transcript("t__1"))
    (folder / "trials.jsonl").write_text(json.dumps(row | {"transcript": location}) + "\n")
    assert len(parse_tokens(page_html(folder))) == 5


def test_changed_text_is_shown_line_by_line(folder) -> None:
    (shown,) = re.findall(r'<pre class="diff">(.*?)</pre>', page_html(folder), re.DOTALL)
    lines = re.findall(r'<span class="(\w+)">(.*?)</span>\n', shown)
    assert lines == [
        ("hunk", "@@ -1,3 +1,4 @@"),
        ("same", " a"),
        ("minus", "-b"),
        ("plus", "+&lt;i&gt;‹U+202E›"),
        ("same", " c"),
        ("plus", "+d"),
    ]
    assert "/app/x‹ESC›" in page_html(folder)


def test_plain_agent_has_commands_and_their_output(tmp_path) -> None:
    nodes = [
        {"message": {"role": "system", "content": LOOP_PROMPT}},
        {"parent": 0, "message": {"role": "user", "content": "Say hello."}},
        answer_node([2], 1),
        {"parent": 2, "message": {"role": "user", "content": "hello.txt"}},
        answer_node([5], 3),
    ]
    transcript = transcript_of({"id": "t__1", "nodes": nodes, "info": {"harbor": {"trial_name": "t__1"}}})
    location = write_transcript(tmp_path / "transcripts", "step_1", transcript)
    run = run_folder(tmp_path / "run", [trial_row("t__1", transcript=location)])
    (tmp_path / "transcripts").rename(run / "transcripts")
    page = page_html(run)
    assert re.findall(r'<pre class="command">(.*?)</pre>', page) == ["ls", "done"]
    assert re.findall(r'<h4>(.*?)</h4><pre class="screen">(.*?)</pre>', page) == [("output", "hello.txt")]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (None, "a\n", ["@@ -0,0 +1 @@", "+a"]),
        ("a", None, ["@@ -1 +0,0 @@", "-a"]),
        ("a", "a\n", []),
        (None, "", []),
        (None, None, []),
        ("", "--- x\n+++ y", ["@@ -0,0 +1,2 @@", "+--- x", "++++ y"]),
    ],
)
def test_lines_of_a_difference(before, after, lines) -> None:
    assert [text for _, text in diff_lines(before, after)] == lines
