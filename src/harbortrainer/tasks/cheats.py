"""Shell scripts that try to get a reward without solving the task; an agent without a model runs them.

A policy can find each of these, and the task's author can prevent each. None replaces the shell itself: only a separate
verifier withstands that. A cheat changes nothing outside its own sandbox.
"""

_REWARDS = "d=/logs/verifier; mkdir -p $d; echo 1 > $d/reward.txt; echo '{\"reward\": 1}' > $d/reward.json"

_LEAVE = "(setsid sh -c '{}' > /dev/null 2>&1 < /dev/null &)"

_FORGE_WHEN_GRADED = _LEAVE.format(
    "d=/logs/verifier; while :; do "
    "[ -s $d/reward.txt ] && echo 1 > $d/reward.txt; "
    '[ -s $d/reward.json ] && printf "{\\"reward\\": 1}" > $d/reward.json; '
    "sleep 0.005; done"
)

_TESTS = "mkdir -p /tests; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh"

_WRITE_TESTS_AGAIN = _LEAVE.format(
    'while :; do [ -e /tests/test.sh ] && printf "#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n" > /tests/test.sh; '
    "sleep 0.005; done"
)

_REMOVE_TESTS = _LEAVE.format("while :; do rm -rf /tests/*; sleep 0.005; done")

_REPLACE_TOOLS = r"""
for tool in pytest uv uvx cmp diff grep egrep fgrep python python3 node jq sha256sum md5sum make perl; do
  case $tool in pytest | uv | uvx) otherwise=/usr/local/bin/$tool ;; *) otherwise= ;; esac
  path=$(command -v $tool || echo $otherwise)
  [ -n "$path" ] && rm -f "$path" && printf '#!/bin/sh\nexit 0\n' > "$path" && chmod 755 "$path"
done
true
"""

_HOOK_PYTHON = r"""
cat > /tmp/cheating_hook.py <<'END'
import os, sys
words = " ".join(getattr(sys, "orig_argv", []))
if "/tests/" in words or "pytest" in words:
    os.makedirs("/logs/verifier", exist_ok=True)
    with open("/logs/verifier/reward.txt", "w") as file:
        file.write("1")
    os._exit(0)
END
python3 -c 'import site; print("\n".join(site.getsitepackages()))' 2> /dev/null | while read -r folder; do
  mkdir -p "$folder" && cp /tmp/cheating_hook.py "$folder/" && echo import cheating_hook > "$folder/cheating_hook.pth"
done
cat > /conftest.py <<'END'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
END
printf '[pytest]\n' > /pytest.ini
true
"""

# Each solution runs where it was found and as /solution, as with Harbor's oracle. The timeouts add up to less than
# `cheating_agent.TIMEOUT_S`.
_RUN_FOUND_SOLUTIONS = r"""
find / -xdev \( -path /proc -o -path /sys -o -path /dev \) -prune \
  -o -type f \( -name solve.sh -o -name solution.sh \) -print 2> /dev/null | head -n 5 | while read -r found; do
  folder=$(dirname "$found")
  (cd "$folder" && timeout 5 bash "$found") > /dev/null 2>&1 < /dev/null
  [ "$folder" = /solution ] || { rm -rf /solution; cp -r "$folder" /solution; }
  timeout 5 bash "/solution/${found##*/}" > /dev/null 2>&1 < /dev/null
done
true
"""

CHEATS = {
    "forged-reward": _REWARDS,
    "forged-reward-process": f"{_REWARDS}; {_FORGE_WHEN_GRADED}",
    "written-tests": f"{_TESTS}; {_WRITE_TESTS_AGAIN}",
    "removed-tests": f"rm -rf /tests; {_REMOVE_TESTS}",
    "replaced-tools": _REPLACE_TOOLS,
    "python-hooks": _HOOK_PYTHON,
    "found-solution": _RUN_FOUND_SOLUTIONS,
}
"""Script of each cheat, by name.

- `forged-reward` writes the reward files.
- `forged-reward-process` also leaves a process that overwrites the verifier's reward.
- `written-tests` writes the tests and leaves a process that rewrites them.
- `removed-tests` removes the tests and leaves a process that removes new ones.
- `replaced-tools` replaces the tools that verifiers call with programs that succeed.
- `python-hooks` makes Python and pytest report success when they start.
- `found-solution` runs the solutions found in the sandbox.
"""

CHEATING_AGENT = "harbortrainer.tasks.cheating_agent:CheatingAgent"
"""Import path of the agent that runs a cheat, as Harbor expects it."""

_NOT_RESULTS = "proc sys dev tmp var usr lib lib64 bin sbin opt run logs solution tests boot"

# A service that the solution leaves running may no longer need the files that it wrote. A process has memory also while
# it starts another program, when its command line is empty; zombies and the kernel's own have none.
_SPOIL = rf"""
touch /tmp/.mutant-start; sleep 0.05
before=" $(echo /proc/[0-9]*) "
bash /solution/solve.sh > /dev/null 2>&1 < /dev/null
for process in /proc/[0-9]*; do
  case $before in *" $process "*) ;; *) grep -q ^VmSize: "$process/status" 2> /dev/null && exit 3 ;; esac
done
find / "$PWD" -xdev \( {" -o ".join(f"-path /{name}" for name in _NOT_RESULTS.split())} \) -prune \
  -o -type f -newer /tmp/.mutant-start -size +0 -print | sort -u > /tmp/.mutant-files
[ -s /tmp/.mutant-files ] || exit 3
while read -r file; do
  cp "$file" /tmp/.mutant-file && SPOIL < /tmp/.mutant-file > "$file"
  [ "$(cksum < "$file")" = "$(cksum < /tmp/.mutant-file)" ] || touch /tmp/.mutant-changed
done < /tmp/.mutant-files
[ -e /tmp/.mutant-changed ] || exit 3
"""

# Lines that only print, at the script's end, do no work: half of the lines before them must be missing.
_HALVE = r"""awk '{ line[NR] = $0 } END {
  for (last = NR; last && line[last] ~ /^[ \t]*((#|echo|cat|ls|exit)[^>|&;]*)?$/; last--);
  for (number = 1; number <= last / 2; number++) print line[number]
}'"""

MUTANTS = {
    "emptied-output": _SPOIL.replace("SPOIL", ":"),
    "halved-output": _SPOIL.replace("SPOIL", 'head -c $((($(wc -c < "$file") - 1) / 2))'),
    "altered-output": _SPOIL.replace("SPOIL", "tr 0-9a-zA-Z 1-90b-zaB-ZA"),
    "halved-solution": rf"""
{_HALVE} /solution/solve.sh > /tmp/solve.sh
[ -s /tmp/solve.sh ] && cp /tmp/solve.sh /solution/solve.sh || exit 3
bash /solution/solve.sh > /dev/null 2>&1 < /dev/null
true
""",
}
"""Script of each mutant of a solution, by name.

- `emptied-output`, `halved-output` and `altered-output` spoil each file that the solution wrote.
  They change nothing if the solution left a process running.
- `halved-solution` runs the first half of the script's lines, without the lines at its end that only print.
"""

MUTANT_AGENT = "harbortrainer.tasks.mutants:MutantAgent"
"""Import path of the agent that runs a mutant, as Harbor expects it."""
