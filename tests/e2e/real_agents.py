"""Run one of Harbor's installed agents on one trial with a scripted model, and print whether its tokens were captured.

    PYTHONPATH=tests:datasets/quickstart .venv/bin/python tests/e2e/real_agents.py mini-swe-agent
    PYTHONPATH=tests:datasets/quickstart .venv/bin/python tests/e2e/real_agents.py claude-code --in public --thinks
    PYTHONPATH=tests:datasets/quickstart .venv/bin/python tests/e2e/real_agents.py codex --in docker --image IMAGE

`--in` selects the sandbox:

| value | sandbox | where the agent's program must be |
|---|---|---|
| `local` | local, without network | below /usr on this machine, on the PATH |
| `public` | local, with network | below /usr on this machine, on the PATH |
| `docker` | container | in the image given by `--image`, on the PATH |

How to install an agent below /usr:

- Python agents: a virtual environment of the system's Python in /usr/local, with a link in /usr/local/bin.
- claude, opencode, codex: the single file that npm installs.
- qwen, pi: a script that starts the agent with a Node below /usr.
- openhands-sdk: runs only in `docker`, because Harbor expects it in /opt.

Harbor always reinstalls langgraph, strands and nemo-agent. If it cannot, their image needs a `uv` that only links the
existing environment. langgraph needs `--kwargs '{"project_path": FOLDER}'`; its graph has a tool `run(command)`.
strands needs `--kwargs '{"factory_path": FOLDER}'`.

The model calls the agent's command tool twice and then ends. With `--thinks`, each answer begins with reasoning.
`mini-swe-agent-text` is mini-swe-agent without tool calls. Its `--file` is mini-swe-agent's mini_textbased.yaml with
`model_class: litellm_textbased` below `model`.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from fakes import make_task
from plugin_runs import config, play
from renderers import Qwen3RendererConfig
from scripted_engine import Script, ScriptedEngine, by_turn

from tiny_policy.prompts import episode
from tiny_policy.tokenizer import train_tokenizer

TOOLS: dict[str, tuple[str, str, dict]] = {
    "mini-swe-agent": ("bash", "command", {}),
    "claude-code": ("Bash", "command", {"description": "look"}),
    "opencode": ("bash", "command", {"description": "look"}),
    "codex": ("exec_command", "cmd", {}),
    "qwen-coder": ("run_shell_command", "command", {"is_background": False, "description": "look"}),
    "pi": ("bash", "command", {}),
    "openhands-sdk": ("terminal", "command", {}),
    "kimi-cli": ("Shell", "command", {}),
    "kimi-code": ("Bash", "command", {}),
    "vibe": ("bash", "command", {}),
    "trae-agent": ("bash", "command", {}),
    "swe-agent": ("bash", "command", {}),
    "openhands": ("execute_bash", "command", {"security_risk": "LOW"}),
    "openclaw": ("exec", "command", {}),
    "code-puppy": ("shell", "command", {}),
    "goose": ("shell", "command", {}),
    "strands": ("sandbox_shell", "command", {}),
    "langgraph": ("run", "command", {}),
    "deerflow": ("bash", "command", {"description": "look"}),
}
"""Each agent's command tool, the tool's command argument, and its other required arguments."""
FINAL_CALLS: dict[str, tuple[str, dict]] = {
    "mini-swe-agent": ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    "trae-agent": ("task_done", {}),
    "swe-agent": ("submit", {}),
    "openhands": ("finish", {"message": "All done."}),
}
"""The tool call that ends the trial, for agents that need one."""
TEXT_AGENT = "mini-swe-agent-text"
ONLY_ANSWERS = {"aider": "I make it.\n\nanswer\n```\nyes\n```", "nemo-agent": "yes"}
"""The model's only answer, for agents without a command tool. nemo-agent creates no file from it."""
INSTRUCTION = "Create the file /app/answer"
TASKS = {
    "local": "[environment]\nallow_internet = false\nmemory_mb = 3000\n",
    "public": "[environment]\nmemory_mb = 3000\n",
    "docker": "",
}
"""Text that is added to task.toml, by sandbox (the values of `--in`)."""


def script_of(agent: str, *, thinks: bool) -> Script:
    """Return the model's script. It counts turns after the instruction, because aider puts an example before it."""
    texts = answers(agent)
    if thinks:  # the thoughts differ because goose merges two turns that have the same one
        texts = [f"<think>\nI think of it, {turn}.\n</think>\n\n{answer}" for turn, answer in enumerate(texts)]
    script = by_turn(texts)
    return lambda prompt: script(prompt[prompt.find(INSTRUCTION) :])


def answers(agent: str) -> list[str]:
    """Return the model's answers: text with a tool call, a tool call, and the end."""
    if agent in ONLY_ANSWERS:
        return [ONLY_ANSWERS[agent]]
    tool, argument, other_arguments = TOOLS[agent.removesuffix("-text")]

    def tool_call(name: str, arguments: dict) -> str:
        if agent == TEXT_AGENT:
            return f"```mswea_bash_command\n{arguments['command']}\n```"
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    commands = ("mkdir -p /app && touch /app/answer", "ls /app")
    first, second = (tool_call(tool, {argument: command, **other_arguments}) for command in commands)
    final = FINAL_CALLS.get(agent.removesuffix("-text"))
    return ["I look.\n\n" + first, second, tool_call(*final) if final else "All done."]


def main(args: argparse.Namespace) -> None:
    """Run one trial and print its outcome, and whether its tokens equal the sampled ones."""
    work = Path(tempfile.mkdtemp(prefix="real-agents-"))
    train_tokenizer([episode("x", ["touch /app/answer"])]).save_pretrained(work / "tokenizer")
    dockerfile = f"FROM {args.image}\nWORKDIR /app\n"
    make_task(work / "tasks" / "answer", agent_timeout_s=300, extra=TASKS[args.where], dockerfile=dockerfile)
    harness = {"agent": args.agent.removesuffix("-text"), "environment_type": "docker"}
    if args.where != "docker":
        harness |= {"environment_type": "local", "environment_kwargs": {"image": "host"}}
    harness |= {"agent_kwargs": ({"config_file": args.file} if args.file else {}) | json.loads(args.kwargs)}
    env = config(work / "tasks", work / "trials", harness=harness, retries={"max_retries": 0})
    script, chat_format = script_of(args.agent, thinks=args.thinks), Qwen3RendererConfig(thinking_retention="all")
    with ScriptedEngine(work / "tokenizer", script, max_model_len=1_000_000, format=chat_format) as engine:
        (result,) = asyncio.run(play(env, engine))
    (trace,) = result.traces
    record = trace.info["harbor"]
    kept = [[t for t, m in zip(node.token_ids, node.mask, strict=True) if m] for node in trace.nodes if node.sampled]
    exact = kept == [sample.token_ids for sample in engine.samples]
    print(f"{args.agent} in {args.where}: {record['outcome']}, reward {record['reward']}", end=", ")
    print(f"{engine.calls} calls, {len(trace.branches)} branches, {'as sampled' if exact else 'TOKENS DIFFER'}")
    print(f"seconds of the agent: {record['timings']['agent_execution']}; trials: {work / 'trials'}")
    if record["error"]:
        print(f"{record['error']['type']}: {record['error']['message']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("agent", choices=[TEXT_AGENT, *ONLY_ANSWERS, *TOOLS])
    parser.add_argument("--in", dest="where", choices=TASKS, default="local")
    parser.add_argument("--image", default="debian:12-slim")
    parser.add_argument("--file", default="")
    parser.add_argument("--kwargs", default="{}", help="other arguments of the agent's class, as JSON")
    parser.add_argument("--thinks", action="store_true")
    main(parser.parse_args())
