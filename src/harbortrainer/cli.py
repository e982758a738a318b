"""The command line: parse, call, print. Every command's work is a function elsewhere.

Contract: a mistake of the user's is one line on stderr and exit code 2; a run that cannot go on is one line and exit
code 1; Ctrl-C is 130; what Prime-RL returns is returned. Importing this module imports neither torch nor harbor.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from harbortrainer import __version__
from harbortrainer.config.plugin import NEAR_COPY
from harbortrainer.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USER_ERROR, RunStoppedError, UserError

app = typer.Typer(
    name="harbortrainer",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
tasks_app = typer.Typer(help="Look at Harbor tasks.", no_args_is_help=True, rich_markup_mode=None)
images_app = typer.Typer(help="Look at what local sandboxes keep.", no_args_is_help=True, rich_markup_mode=None)
config_app = typer.Typer(help="Look at run files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tasks_app, name="tasks")
app.add_typer(config_app, name="config")
app.add_typer(images_app, name="images")

# Every mistake in the words of a command; typer exports no name for it.
ParseError = cast("type[Exception]", typer.BadParameter.__mro__[1])

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="Run file (TOML, Prime-RL's own schema).")]
TasksArgument = Annotated[str, typer.Argument(help="Folder of Harbor tasks, or what `tasks fetch` takes.")]
NearCopyOption = Annotated[
    float, typer.Option(min=0.01, max=1, help="Likeness of words from which two tasks count as one.")
]
EngineOption = Annotated[str, typer.Option(help="auto, prime-rl or local.")]


def tell_version(asked: bool) -> None:
    """Print the release and end."""
    if asked:
        print(f"harbortrainer {__version__}")
        raise typer.Exit


@app.callback()
def everything(
    version: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Show the release and exit.")
    ] = False,
) -> None:
    """Train language-model agents by reinforcement learning on Harbor tasks."""


@app.command(context_settings=PASS_ON)
def train(
    context: typer.Context,
    config: ConfigOption,
    engine: EngineOption = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last finished step.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start nothing.")] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="On Prime-RL: how often a failed run goes on from its last checkpoint.")
    ] = 0,
) -> None:
    """Train the policy of a run file; further options override its keys: --trainer.optim.lr 1e-5."""
    from harbortrainer.commands.launch import launch

    raise typer.Exit(launch(config, context.args, engine=engine, resume=resume, dry_run=dry_run, restarts=restarts))


@app.command(context_settings=PASS_ON)
def doctor(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Check for this run file.")] = None,
    engine: EngineOption = "auto",
) -> None:
    """Check this machine: what a run needs, green, yellow or red, and what to do about it."""
    from harbortrainer.commands.diagnose import diagnose

    raise typer.Exit(diagnose(config, context.args, engine=engine))


@app.command(context_settings=PASS_ON)
def warmup(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Run file with a [warmup] table.")] = None,
    model: Annotated[str | None, typer.Option(help="Without a run file: the model to start from.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="Without a run file: tasks whose solutions are learned.")] = None,
    trials: Annotated[
        Path | None, typer.Option("--from", help="Instead of tasks: a run, whose good trials are learned.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder the policy is written to.")] = Path("outputs/warmup"),
) -> None:
    """Make a policy by supervised training on solutions or good trials; other options set keys: --warmup.steps 50."""
    from harbortrainer.commands.warm_up import warm_up

    print(warm_up(config, context.args, out, model=model, tasks=tasks, run=trials))


@app.command("eval")
def evaluation(
    context: typer.Context,
    tasks: Annotated[str | None, typer.Argument(help="Folder of Harbor tasks, or what `tasks fetch` takes.")] = None,
    model: Annotated[str | None, typer.Option(help="Model (folder, hub id), adapter, checkpoint or run.")] = None,
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible server (its /v1) that has the model.")] = None,
    api_key_var: Annotated[str, typer.Option(help="Variable with that server's key.")] = "OPENAI_API_KEY",
    agent: Annotated[str | None, typer.Option(help="Harbor agent: oracle, nop (no model), terminus-2, ...")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Play as this run file's evaluation.")] = None,
    environment: Annotated[str | None, typer.Option(help="Where the sandboxes run: local, docker, ...")] = None,
    environment_kwarg: Annotated[
        list[str] | None, typer.Option("--environment-kwarg", "--ek", help="NAME=VALUE of its class: image=host.")
    ] = None,
    attempts: Annotated[int, typer.Option("-k", "--attempts", min=1, help="Attempts at each task.")] = 1,
    parallel: Annotated[int | None, typer.Option(min=1, help="Trials at once.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the evaluation.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Play what is missing in that folder.")] = False,
    ci: Annotated[str, typer.Option(help="How intervals are computed: t or bootstrap.")] = "t",
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Compare two evaluations instead.")] = None,
    difficulty: Annotated[Path | None, typer.Option(help="Write measured pass rates here.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="Of the sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one answer.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Most turns of one trial, its steps together.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of a model served here.")] = None,
    price_in: Annotated[float | None, typer.Option(min=0.0, help="Dollars a million prompt tokens.")] = None,
    price_out: Annotated[float | None, typer.Option(min=0.0, help="Dollars a million sampled tokens.")] = None,
) -> None:
    """Play tasks with a policy, with intervals, pass@k and pass^k; or compare two such evaluations task by task."""
    from harbortrainer.commands.evaluate import EvalOrder, evaluate

    raise typer.Exit(evaluate(EvalOrder.model_validate(context.params)))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, of either engine.")],
    step: Annotated[int | None, typer.Option(min=1, help="Which step's policy; the newest by default.")] = None,
    merged: Annotated[
        bool | None,
        typer.Option(
            "--merged/--adapter", help="A whole model, or a LoRA; by default a LoRA if its base is on the hub."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; beside the run's by default.")] = None,
    evaluated: Annotated[
        list[Path] | None, typer.Option("--eval", help="An evaluation of this policy, for the model card.")
    ] = None,
    push: Annotated[str | None, typer.Option(help="ORG/NAME on the Hugging Face hub to put it, private.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Let everybody see what is pushed.")] = False,
    sft: Annotated[
        Path | None, typer.Option(help="Write good trials for TRL and Prime-RL's sft to this file instead (JSONL).")
    ] = None,
    min_reward: Annotated[float, typer.Option(help="With --sft: the least reward of a good trial.")] = 1.0,
) -> None:
    """Write what a run trained as others load it: adapter or whole model, tokenizer, model card; or its good trials."""
    from harbortrainer.commands.export_run import ExportOrder, export_run, export_trials

    if sft is not None:
        alone = not any((step, out, evaluated, push, public)) and merged is None
        raise typer.Exit(export_trials(run, sft, min_reward=min_reward, alone=alone))
    from harbortrainer.export.hub_push import HubRepo

    repo = HubRepo(push, public) if push is not None else None
    raise typer.Exit(export_run(ExportOrder(run, step, merged, out, tuple(evaluated or ()), repo)))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Hub id or folder of a model.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    max_model_len: Annotated[int, typer.Option(help="Most tokens of prompt and answer.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Serve a model with the embedded sampler until Ctrl-C."""
    from harbortrainer.commands.serve_model import serve_model

    raise typer.Exit(serve_model(model, port=port, max_model_len=max_model_len, seed=seed))


@app.command()
def rollout(
    task: Annotated[str, typer.Argument(help="Folder of one Harbor task.")],
    model: Annotated[
        str | None, typer.Option(help="Model, adapter, run or checkpoint; a server's name for it with --base-url.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible server, with its /v1.")] = None,
    api_key_var: Annotated[str, typer.Option(help="Variable that holds that server's key.")] = "OPENAI_API_KEY",
    agent: Annotated[str | None, typer.Option(help="oracle, nop, or who plays instead of Terminus-2.")] = None,
    environment: Annotated[str | None, typer.Option(help="Where the sandbox runs.")] = None,
    environment_kwarg: Annotated[
        list[str] | None, typer.Option("--environment-kwarg", "--ek", help="NAME=VALUE of its class: image=host.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Of the sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one answer.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Most turns of each step.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder in which the trial stays, to look at.")] = None,
) -> None:
    """Play one task once, live: what the terminal shows, what the model says, what came of it."""
    from harbortrainer.commands.play_once import RolloutOrder
    from harbortrainer.commands.play_once import rollout as play

    order = RolloutOrder(
        task=task,
        model=model,
        base_url=base_url,
        api_key_var=api_key_var,
        agent=agent,
        environment=environment,
        environment_kwarg=environment_kwarg or [],
        temperature=temperature,
        max_tokens=max_tokens,
        max_turns=max_turns,
        keep=keep,
    )
    raise typer.Exit(play(order))


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="Folder of a run (outputs/NAME) or of an evaluation.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 8321,
    export: Annotated[Path | None, typer.Option(help="Write the pages into this one HTML file instead.")] = None,
    trials: Annotated[int, typer.Option(min=0, help="With --export: how many trials in full.")] = 40,
    only: Annotated[str, typer.Option(help="With --export: which, as an address says it: 'reward=0&step=3..'.")] = "",
    browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Look at a run, also while it goes on: its gain, its tasks, each trial turn by turn; on this machine only."""
    from harbortrainer.commands.view_run import view_run

    raise typer.Exit(view_run(run, port=port, export=export, trials=trials, only=only, browser=browser))


@tasks_app.command("check")
def tasks_check(
    tasks: TasksArgument,
    environment: Annotated[str, typer.Option(help="Where the sandbox runs.")] = "local",
    environment_kwarg: Annotated[
        list[str] | None, typer.Option("--environment-kwarg", "--ek", help="NAME=VALUE of its class: image=host.")
    ] = None,
    parallel: Annotated[int, typer.Option(help="Trials at once.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Trials of the oracle; a reward that changes is a fault.")] = 3,
    cheats: Annotated[
        str, typer.Option(help="Ways to a reward without a solution to try: all, none, or NAME,NAME.")
    ] = "all",
    keep: Annotated[Path | None, typer.Option(help="Folder in which the trials stay, to look at.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what passed before.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write every trial of every task to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a table for people to this file.")] = None,
) -> None:
    """Run each task with its oracle, with an agent that does nothing, and with agents that cheat."""
    from harbortrainer.commands.check_tasks import CheckPlan, Sandboxes, check_tasks

    plan = CheckPlan(
        repeats=repeats, cheats=cheats, parallel=parallel, keep=keep, resume=resume, json=json, markdown=markdown
    )
    raise typer.Exit(check_tasks(tasks, Sandboxes(environment, environment_kwarg or []), plan))


@tasks_app.command("list")
def tasks_list(
    tasks: TasksArgument,
    difficulty: Annotated[Path | None, typer.Option(help="Measured pass rates, from `eval --difficulty`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a program: one JSON object.")] = False,
) -> None:
    """Show what each task asks for (steps, verifier, image, network, resources, time) and what is known of it."""
    from harbortrainer.commands.list_tasks import list_tasks

    raise typer.Exit(list_tasks(tasks, difficulty=difficulty, as_json=as_json))


@tasks_app.command("fetch")
def tasks_fetch(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder, parquet file, NAME@VERSION of Harbor's registry, https://HOST/ORG/REPO@COMMIT#FOLDER, "
            "hf:ORG/NAME@REVISION, or registry.json#NAME@VERSION."
        ),
    ],
    to: Annotated[Path | None, typer.Option(help="Put a copy of the tasks, with their lock, into this folder.")] = None,
) -> None:
    """Bring a set of tasks onto this machine, and print the line that names it for good in a run file."""
    from harbortrainer.commands.fetch_tasks import fetch_tasks

    raise typer.Exit(fetch_tasks(source, to))


@tasks_app.command("split")
def tasks_split(
    folder: Annotated[Path, typer.Argument(help="Folder of Harbor tasks.")],
    eval_share: Annotated[float, typer.Option(min=0.001, max=0.999, help="Share that is held out.")] = 0.2,
    near_copy: NearCopyOption = NEAR_COPY,
    write: Annotated[bool, typer.Option("--write", help="Keep it in FOLDER/split.json, for tasks to come.")] = False,
) -> None:
    """Show which tasks `split = "train"` and "eval" play, and which count as one and so are on one side."""
    from harbortrainer.commands.split_tasks import split_tasks

    raise typer.Exit(split_tasks(folder, eval_share=eval_share, near_copy=near_copy, write=write))


@tasks_app.command("overlap")
def tasks_overlap(
    trained: Annotated[str, typer.Argument(help="Folder or source of tasks that are trained on.")],
    held_out: Annotated[str, typer.Argument(help="Folder or source of tasks that are measured with.")],
    near_copy: NearCopyOption = NEAR_COPY,
) -> None:
    """Print the tasks of one set that are in another too, or near copies of one there; exit code 1 when any is."""
    from harbortrainer.commands.split_tasks import show_overlap

    raise typer.Exit(show_overlap(trained, held_out, near_copy=near_copy))


CacheOption = Annotated[Path | None, typer.Option(help="Their folder, where it is not the usual one.")]


@images_app.command("list")
def images_list(cache_dir: CacheOption = None) -> None:
    """Show the images and layers that local sandboxes keep on this machine, and their size."""
    from harbortrainer.commands.images import list_images

    list_images(cache_dir)


@images_app.command("prune")
def images_prune(
    to: Annotated[float, typer.Option(min=0, help="GB that may stay; 0 removes all that is not in use.")] = 20.0,
    cache_dir: CacheOption = None,
) -> None:
    """Remove the least recently used images and layers; what a running sandbox stands on stays."""
    from harbortrainer.commands.images import prune_images

    prune_images(cache_dir, to)


@config_app.command("upgrade")
def config_upgrade(
    file: Annotated[Path, typer.Argument(help="Run file in an old spelling.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead.")] = None,
) -> None:
    """Write a run file in today's spelling, with its comments kept; the old one stays beside it as FILE.old."""
    from harbortrainer.config.reader import upgrade_file

    for line in upgrade_file(file, output):
        print(line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        code = typer.main.get_command(app).main(
            list(sys.argv[1:] if arguments is None else arguments), prog_name="harbortrainer", standalone_mode=False
        )
    except UserError as error:
        return _say(f"error: {error}", EXIT_USER_ERROR)
    except RunStoppedError as error:
        return _say(f"stopped: {error}", EXIT_STOPPED)
    except ParseError as error:
        return _say(_parse_message(str(error)), EXIT_USER_ERROR)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def _parse_message(message: str) -> str:
    """A command without a sub-command shows its help, anything else one line."""
    return message if message.startswith("Usage:") else f"error: {message} (--help tells more)"


def _say(line: str, code: int) -> int:
    if line:
        print(line, file=sys.stderr)
    return code
