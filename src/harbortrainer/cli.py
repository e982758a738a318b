"""The command line: parse the arguments, call the command, return its exit code. The commands are in `commands/`.

Exit codes: 2 for a user error and 1 for a run that cannot continue, each with one line on stderr; 130 for Ctrl-C; for
Prime-RL, its own code. Importing this module imports neither torch nor harbor.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from harbortrainer import __version__
from harbortrainer.cli_help import GroupedHelp, examples
from harbortrainer.cli_tasks import (
    DEFAULT_TASKS,
    TASKS_HELP,
    EnvironmentKwargOption,
    ExcludeOption,
    IncludeOption,
    LimitOption,
    ShardOption,
    SkipBadOption,
    TrustOption,
    tasks_app,
)
from harbortrainer.commands.encoding import escape_unprintable, restart_in_utf8
from harbortrainer.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USER_ERROR, RunStoppedError, UserError, lines_of
from harbortrainer.runs.open_files import raise_open_files_limit

app = typer.Typer(
    name="harbortrainer",
    cls=GroupedHelp,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
images_app = typer.Typer(help="Manage the local image cache.", no_args_is_help=True, rich_markup_mode=None)
sandboxes_app = typer.Typer(
    help="List sandboxes, and end those that killed runs left.", no_args_is_help=True, rich_markup_mode=None
)
config_app = typer.Typer(help="Convert old run files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tasks_app, name="tasks")
app.add_typer(config_app, name="config")
app.add_typer(images_app, name="images")
app.add_typer(sandboxes_app, name="sandboxes")

# click's UsageError, the base class of every parse error; typer does not export it.
ParseError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="Run file (TOML, Prime-RL's schema).")]
EngineOption = Annotated[str, typer.Option(help="Training engine: auto, prime-rl or local.")]


def print_version(requested: bool) -> None:
    """Print the version and exit."""
    if requested:
        print(f"harbortrainer {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train language-model agents by reinforcement learning on Harbor tasks."""


@app.command(epilog=examples("init"))
def init(
    tasks: Annotated[str | None, typer.Argument(help=f"{TASKS_HELP} Default: {DEFAULT_TASKS}.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or hub id. Default: Prime-RL's.")] = None,
    engine: Annotated[str | None, typer.Option(help="prime-rl or local. Default: by the GPUs.")] = None,
    warmup: Annotated[bool, typer.Option("--warmup", help="First teach the solutions of the training tasks.")] = False,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs that train. Default: this machine's.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=1, max=1e6, help="GB of each of these GPUs.")] = None,
    trust: TrustOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Run file to write.")] = Path("run.toml"),
) -> None:
    """Write a commented run file for your tasks, model and machine."""
    from harbortrainer.commands.init import InitOrder
    from harbortrainer.commands.init import init as write_run_file

    others = {"engine": engine, "gpus": gpus, "gpu_memory": gpu_memory, "trust": trust or []}
    raise typer.Exit(write_run_file(InitOrder(tasks=tasks, model=model, warmup=warmup, output=output, **others)))


@app.command(context_settings=PASS_ON, epilog=examples("train"))
def train(
    context: typer.Context,
    config: ConfigOption,
    engine: EngineOption = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run file and this machine without starting the run.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="Prime-RL only: times to restart a failed run from its last checkpoint.")
    ] = 0,
) -> None:
    """Train a model as the run file says. Extra options override its keys, e.g. --trainer.optim.lr 1e-5."""
    from harbortrainer.commands.launch import launch

    raise typer.Exit(launch(config, context.args, engine=engine, resume=resume, dry_run=dry_run, restarts=restarts))


@app.command(context_settings=PASS_ON, epilog=examples("doctor"))
def doctor(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Run file to check this machine for.")] = None,
    engine: EngineOption = "auto",
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the model and measure the embedded sampler's tokens per second.")
    ] = False,
) -> None:
    """Show what this machine can run, or check a run file."""
    from harbortrainer.commands.diagnose import diagnose

    raise typer.Exit(diagnose(config, context.args, engine=engine, measure=measure))


@app.command(context_settings=PASS_ON, epilog=examples("warmup"))
def warmup(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Run file with a [warmup] table.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model, when there is no run file.")] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Tasks whose solutions to train on, when there is no run file.")
    ] = None,
    trials: Annotated[
        Path | None, typer.Option("--from", help="Run whose successful trials to train on, instead of tasks.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")] = Path("outputs/warmup"),
) -> None:
    """Fine-tune a model on solutions or successful trials (SFT). Extra options set keys, e.g. --warmup.steps 50."""
    from harbortrainer.commands.warm_up import warm_up

    print(warm_up(config, context.args, out, model=model, tasks=tasks, run=trials))


@app.command("eval", epilog=examples("eval"))
def evaluation(
    context: typer.Context,
    tasks: Annotated[str | None, typer.Argument(help=TASKS_HELP)] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, hub id, adapter, checkpoint or run folder.")] = None,
    base_url: Annotated[str | None, typer.Option(help="URL of an OpenAI-compatible server, ending in /v1.")] = None,
    api_key_var: Annotated[
        str, typer.Option(help="Environment variable with the server's API key.")
    ] = "OPENAI_API_KEY",
    agent: Annotated[
        str | None, typer.Option(help="Harbor agent: terminus-2, ..., or without a model: oracle, nop.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Run file whose evaluation settings to use.")
    ] = None,
    environment: Annotated[str | None, typer.Option(help="Sandbox type: local, docker, ...")] = None,
    environment_kwarg: EnvironmentKwargOption = None,
    trust: TrustOption = None,
    attempts: Annotated[int, typer.Option("-k", "--attempts", min=1, help="Attempts per task.")] = 1,
    parallel: Annotated[int | None, typer.Option(min=1, help="Trials to run in parallel.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the evaluation to.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Run only the trials that --out does not have yet.")] = False,
    ci: Annotated[str, typer.Option(help="Confidence interval: t or bootstrap.")] = "t",
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two evaluation folders; runs no trials.")
    ] = None,
    difficulty: Annotated[Path | None, typer.Option(help="File to write the pass rate of each task to.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="Sampling temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Max tokens per completion.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Max turns per trial, over all its steps.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context length of a model served on this machine.")
    ] = None,
    price_in: Annotated[float | None, typer.Option(min=0.0, help="Dollars per million prompt tokens.")] = None,
    price_out: Annotated[float | None, typer.Option(min=0.0, help="Dollars per million completion tokens.")] = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """Evaluate a model or agent on tasks, or compare two evaluations. Prints mean reward, pass@k and pass^k."""
    from harbortrainer.commands.evaluate import EvalOrder, evaluate

    raise typer.Exit(evaluate(EvalOrder.model_validate(context.params)))


@app.command(epilog=examples("export"))
def export(
    run: Annotated[Path, typer.Argument(help="Run folder, of either engine.")],
    step: Annotated[int | None, typer.Option(min=1, help="Training step to export. Default: the newest.")] = None,
    merged: Annotated[
        bool | None,
        typer.Option(
            "--merged/--adapter", help="Merged weights, or a LoRA adapter (default if its base model is on the hub)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: next to the run folder.")] = None,
    evaluated: Annotated[
        list[Path] | None, typer.Option("--eval", help="Evaluation folder to cite in the model card. Repeatable.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(help="Upload to this Hugging Face repository, ORG/NAME (private).")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: make the repository public.")] = False,
    sft: Annotated[
        Path | None, typer.Option(help="Write successful trials to this JSONL file instead, for TRL or Prime-RL's SFT.")
    ] = None,
    min_reward: Annotated[float, typer.Option(min=-1e9, help="With --sft: minimum reward of a trial.")] = 1.0,
) -> None:
    """Export the trained model as a LoRA adapter or merged weights."""
    from harbortrainer.commands.export_run import ExportOrder, export_run, export_trials

    if sft is not None:
        alone = not any((step, out, evaluated, push, public)) and merged is None
        raise typer.Exit(export_trials(run, sft, min_reward=min_reward, alone=alone))
    from harbortrainer.export.hub_push import HubRepo

    if public and push is None:
        raise UserError("needs --push", where="--public", do="add --push ORG/NAME, or leave --public out")
    repo = HubRepo(push, public) if push is not None else None
    raise typer.Exit(export_run(ExportOrder(run, step, merged, out, tuple(evaluated or ()), repo)))


@app.command(epilog=examples("serve"))
def serve(
    model: Annotated[str, typer.Argument(help="Run, export, adapter or model folder, or hub id.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Context length; at most 4096 by default.")] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
) -> None:
    """Serve a run's policy or a model (OpenAI-compatible). Uses the embedded sampler, until Ctrl-C."""
    from harbortrainer.commands.serve_model import serve_model

    raise typer.Exit(serve_model(model, port=port, max_model_len=max_model_len, seed=seed))


@app.command("serve-env", context_settings=PASS_ON, epilog=examples("serve-env"))
def serve_env(
    context: typer.Context,
    config: ConfigOption,
    address: Annotated[
        str | None, typer.Option(help="tcp://HOST:PORT to listen on. Default: the source's serve.address.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Source to serve, if sources have several servers.")] = None,
    engine: EngineOption = "auto",
) -> None:
    """Run a run's trials on this machine, while another one trains."""
    from harbortrainer.commands.serve_env import serve_env as run_server

    raise typer.Exit(run_server(config, context.args, address=address, source=source, engine=engine))


@app.command(epilog=examples("rollout"))
def rollout(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help="Folder of one Harbor task.")],
    model: Annotated[
        str | None, typer.Option(help="Model, adapter, checkpoint or run; with --base-url, the served model name.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="URL of an OpenAI-compatible server, ending in /v1.")] = None,
    api_key_var: Annotated[
        str, typer.Option(help="Environment variable with the server's API key.")
    ] = "OPENAI_API_KEY",
    agent: Annotated[str | None, typer.Option(help="Agent to run (default: terminus-2).")] = None,
    environment: Annotated[str | None, typer.Option(help="Sandbox type: local, docker, ...")] = None,
    environment_kwarg: EnvironmentKwargOption = None,
    trust: TrustOption = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Max tokens per completion.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Max turns per step.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder to keep the trial in.")] = None,
) -> None:
    """Run one trial of a task and print it live."""
    from harbortrainer.commands.rollout import RolloutOrder
    from harbortrainer.commands.rollout import rollout as play

    raise typer.Exit(play(RolloutOrder.model_validate(context.params)))


@app.command(epilog=examples("view"))
def view(
    run: Annotated[Path, typer.Argument(help="Run or evaluation folder, or a folder of them.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port; 0 picks a free one.")] = 8321,
    export: Annotated[Path | None, typer.Option(help="Write one HTML file instead of serving pages.")] = None,
    trials: Annotated[int, typer.Option(min=0, help="With --export: number of trials to include in full.")] = 40,
    only: Annotated[str, typer.Option(help="With --export: filter, as in a page's URL: 'reward=0&step=3..'.")] = "",
    browser: Annotated[bool, typer.Option("--open", help="Open the browser.")] = False,
) -> None:
    """Open a local web dashboard for a run, an evaluation or a folder."""
    from harbortrainer.commands.view_run import view_run

    raise typer.Exit(view_run(run, port=port, export=export, trials=trials, only=only, browser=browser))


CacheOption = Annotated[Path | None, typer.Option(help="Cache folder, if not the default.")]


@images_app.command("list", epilog=examples("images list"))
def images_list(cache_dir: CacheOption = None) -> None:
    """List the cached images and layers, with their sizes."""
    from harbortrainer.commands.images import list_images

    list_images(cache_dir)


@images_app.command("prune", epilog=examples("images prune"))
def images_prune(
    to: Annotated[float, typer.Option(min=0, max=1e9, help="GB to keep; 0 removes everything not in use.")] = 20.0,
    cache_dir: CacheOption = None,
) -> None:
    """Remove the least recently used images and layers. Those in use by running sandboxes stay."""
    from harbortrainer.commands.images import prune_images

    prune_images(cache_dir, to)


RunsArgument = Annotated[list[str] | None, typer.Argument(help="Labels or folders of runs.")]


@sandboxes_app.command("list", epilog=examples("sandboxes list"))
def sandboxes_list(runs: RunsArgument = None) -> None:
    """List sandboxes, here and at providers, with their runs' states."""
    from harbortrainer.commands.sandboxes import list_sandboxes

    list_sandboxes(runs or [])


@sandboxes_app.command("end", epilog=examples("sandboxes end"))
def sandboxes_end(
    runs: RunsArgument = None,
    all_ended: Annotated[bool, typer.Option("--all", help="End what all of your killed runs left.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """End the sandboxes that killed runs left. Active runs keep theirs."""
    from harbortrainer.commands.sandboxes import end_sandboxes

    end_sandboxes(runs or [], all_ended=all_ended, yes=yes)


@config_app.command("upgrade", epilog=examples("config upgrade"))
def config_upgrade(
    file: Annotated[Path, typer.Argument(help="Run file.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
    to: Annotated[Literal["pin", "v0.9"] | None, typer.Option(help="The Prime-RL that will read the file.")] = None,
) -> None:
    """Convert a run file to other key names. Comments are lost; the old file is kept as FILE.old."""
    from harbortrainer.config.reader import upgrade_file

    for line in upgrade_file(file, output, to):
        print(line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. By default its arguments are those of this process."""
    if arguments is None:
        restart_in_utf8()
    escape_unprintable()
    raise_open_files_limit()
    try:
        code = typer.main.get_command(app).main(
            list(sys.argv[1:] if arguments is None else arguments), prog_name="harbortrainer", standalone_mode=False
        )
    except (UserError, OSError) as error:
        return _print_error(lines_of(error, sys.argv[1:] if arguments is None else arguments), EXIT_USER_ERROR)
    except RunStoppedError as error:
        return _print_error(f"stopped: {error}", EXIT_STOPPED)
    except ParseError as error:
        return _print_error(_parse_message(error.format_message()), EXIT_USER_ERROR)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def _parse_message(message: str) -> str:
    """The help of a command without a sub-command, else one line."""
    return message if message.startswith("Usage:") else f"error: {message.removesuffix('.')} (see --help)"


def _print_error(line: str, code: int) -> int:
    if line:
        print(line, file=sys.stderr)
    return code
