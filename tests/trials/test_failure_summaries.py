"""Failure messages name the failed sandbox step and keep the end, which has the cause."""

import pytest

from harbortrainer.sandbox.build_log import whole_beginning, whole_end
from harbortrainer.sandbox.images.child_process import Output
from harbortrainer.trials.harbor_result import MAX_CHARS, summarize_failure, summarize_in_one_line

COMMAND = "docker compose --project-name p --project-directory /t/environment -f /tmp/a.json -f /tmp/b.yaml"
BUILDKIT = """#5 [main 2/2] RUN useradd -m worker
#5 0.1 lots of output
------
 > [main 2/2] RUN useradd -m worker:
------
failed to solve: process "/bin/sh -c useradd -m worker" did not complete successfully: exit code: 1"""
FIRST_BUILDER = """Step 1/2 : FROM debian:12-slim
 ---> 5789114a50ae
Step 2/2 : RUN apt-get install -y nothing
E: Unable to locate package nothing"""


def failed(verb: str, out: str, err: str = "None") -> str:
    """Return Harbor's message for a failed docker compose command."""
    return (
        f"Docker compose command failed for environment task-1. Command: {COMMAND} {verb}. Return code: 17. "
        f"Stdout: {out}. Stderr: {err}. "
    )


@pytest.mark.parametrize(
    ("out", "step", "cause"),
    [
        (BUILDKIT, "RUN useradd -m worker", "exit code: 1"),
        (FIRST_BUILDER, "RUN apt-get install -y nothing", "E: Unable to locate package nothing"),
    ],
)
def test_failed_build_names_instruction(out, step, cause):
    message = summarize_failure(failed("build", out))
    assert message.startswith(f"the image cannot be built at `{step}` (code 17): ")
    assert message.endswith(cause)


def test_failed_local_build_names_instruction():
    failure = 'the Dockerfile cannot be built: STEP 1/2: FROM a\nError: building at STEP "RUN exit 3": exit status 3'
    assert summarize_failure(failure).startswith("the image cannot be built at `RUN exit 3`: STEP 1/2")
    assert summarize_failure(failure).endswith("exit status 3")


def test_failed_docker_build_for_local_sandbox_names_instruction():
    failure = "the Dockerfile cannot be built: Step 1/2 : FROM a\n ---> 2c\nStep 2/2 : RUN exit 3\na non-zero code: 3"
    assert summarize_failure(failure).startswith("the image cannot be built at `RUN exit 3`: Step 1/2")
    assert summarize_failure(failure).endswith("code: 3")


LONG = 'echo "{"a": 1}" && apt-get install -y ' + " ".join(f"package-{number}=1.0" for number in range(300))
CAUSE = "E: Version '1.0' for 'package-7' was not found"


@pytest.mark.parametrize(
    "output",
    [
        Output(
            1,
            f"STEP 2/2: RUN {LONG}",
            f'{CAUSE}\nsubprocess exited with status 100\nError: building at STEP "RUN {LONG}": exit 100',
        ),
        Output(1, f"Step 2/2 : RUN {LONG}\n{CAUSE}", f"The command '/bin/sh -c {LONG}' returned a non-zero code: 100"),
    ],
)
def test_one_line_summary_of_long_instruction_keeps_cause(output):
    line = summarize_in_one_line(summarize_failure(f"the Dockerfile cannot be built: {output.tail}"))
    assert CAUSE in line and line.endswith("100")
    assert "RUN echo" in line


def test_text_after_short_instruction_is_kept():
    reason = f'checking on sources under "/{"deep/" * 30}": copier: stat: "/a": no such file'
    err = f'Error: building at STEP "COPY a /a": {reason}'
    assert Output(125, "STEP 2/2: COPY a /a", err).tail == f"STEP 2/2: COPY a /a\n{err}"


def test_compose_build_summary_keeps_cause():
    err = f'failed to solve: process "/bin/sh -c {LONG}" did not complete successfully: exit code: 100'
    excerpt = f"Dockerfile:2\n{'-' * 20}\n   1 |     FROM a\n   2 | >>> RUN {LONG}\n{'-' * 20}\n"
    out = f" > [main 2/2] RUN {LONG}:\n0.1 {CAUSE}\n------\n{excerpt}"
    line = summarize_in_one_line(summarize_failure(failed("build", out, err)))
    assert CAUSE in line and line.endswith("100")


def test_summary_in_one_line():
    line = summarize_in_one_line(summarize_failure(failed("build", FIRST_BUILDER + "\nnoise" * 500 + "\nthe cause")))
    assert line.startswith("the image cannot be built at `RUN apt-get") and line.endswith("the cause")
    assert "\n" not in line and len(line) < 510


def test_unstarted_containers_name_the_cause():
    message = summarize_failure(
        failed("up --detach --wait", " Container side  Error\ndependency failed to start: side is unhealthy")
    )
    assert message.startswith("the containers do not start (code 17): ")
    assert message.endswith("side is unhealthy")


def test_other_compose_command_is_named():
    assert (
        summarize_failure(failed("cp a main:/b", "no such file")) == "docker compose cp failed (code 17): no such file"
    )


def test_cause_is_kept_after_message():
    assert summarize_failure(failed("build", "x") + "(caused by OSError: no room)").endswith(
        "x(caused by OSError: no room)"
    )


@pytest.mark.parametrize("wrap", [str, lambda text: failed("build", text)])
def test_long_message_keeps_its_end(wrap):
    message = summarize_failure(wrap("begins here " + "noise " * 1000 + "the cause"))
    assert "begins here" in message and message.endswith("the cause")
    assert MAX_CHARS < len(message) < MAX_CHARS + 10


def test_long_log_is_cut_between_lines():
    log = "\n".join(f"line {number} of the builder's output" for number in range(300))
    message = summarize_failure(f"the Dockerfile cannot be built: {Output(1, log, 'the cause').tail}")
    shown = message.split("cannot be built: ")[1].split("\n")
    assert len(shown) > 30
    assert {*shown} <= {*log.split("\n"), "the cause", "[...]"} and shown[-1] == "the cause"
    line = summarize_in_one_line(message).removeprefix("the Dockerfile cannot be built: ")
    assert line.startswith("line ") and " [...] line " in line and line.endswith("output the cause")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("abcde\nf g h i", "f g h i"),
        ("long line of words", "of words"),
        ("x" * 20, "x" * 8),
        ("short", "short"),
        ("line\nno\nend", "no\nend"),
    ],
)
def test_whole_end_keeps_lines_then_words(text: str, end: str):
    assert whole_end(text, 8) == end


def test_whole_beginning_keeps_words():
    assert whole_beginning("one two three", 9) == "one two"
    assert whole_beginning("one two three", 7) == "one two"
    assert whole_beginning("one\ntwo three", 6) == "one"
    assert whole_beginning("x" * 20, 8) == "x" * 8
