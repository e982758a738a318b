"""The command line: parse, call, print. Every command's work is a function elsewhere.

Contract: a mistake of the user's is one line on stderr and exit code 2; a run that cannot go on is one line and exit
code 1; Ctrl-C is 130; what Prime-RL returns is returned. Importing this module imports neither torch nor harbor.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from harbortrainer.engines.local.stop import RunStoppedError
from harbortrainer.errors import EXIT_USER_ERROR, UserError

EXIT_INTERRUPTED = 130
EXIT_STOPPED = 1

app = typer.Typer(
    name="harbortrainer",
    help="Train language-model agents by reinforcement learning on Harbor tasks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
tasks_app = typer.Typer(help="Look at Harbor tasks.", no_args_is_help=True, rich_markup_mode=None)
config_app = typer.Typer(help="Look at run files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tasks_app, name="tasks")
app.add_typer(config_app, name="config")

# Every mistake in the words of a command; typer exports no name for it.
ParseError = cast("type[Exception]", typer.BadParameter.__mro__[1])

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="Run file (TOML, Prime-RL's own schema).")]
EngineOption = Annotated[str, typer.Option(help="auto, prime-rl or local.")]


@app.command(context_settings=PASS_ON)
def train(
    context: typer.Context,
    config: ConfigOption,
    engine: EngineOption = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last finished step.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start nothing.")] = False,
) -> None:
    """Train the policy of a run file; further options override its keys: --trainer.optim.lr 1e-5."""
    from harbortrainer.launch import launch

    raise typer.Exit(launch(config, context.args, engine=engine, resume=resume, dry_run=dry_run))


@app.command(context_settings=PASS_ON)
def doctor(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Check for this run file.")] = None,
    engine: EngineOption = "auto",
) -> None:
    """Check this machine: what a run needs, green, yellow or red, and what to do about it."""
    from harbortrainer.launch import diagnose

    raise typer.Exit(diagnose(config, context.args, engine=engine))


@app.command(context_settings=PASS_ON)
def warmup(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Run file with a [warmup] table.")] = None,
    model: Annotated[str | None, typer.Option(help="Without a run file: the model to start from.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="Without a run file: tasks whose solutions are learned.")] = None,
    out: Annotated[Path, typer.Option(help="Folder the policy is written to.")] = Path("outputs/warmup"),
) -> None:
    """Make a policy by supervised training on solutions; further options override keys: --warmup.steps 50."""
    from harbortrainer.launch import warm_up

    print(warm_up(config, context.args, out, model=model, tasks=tasks))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Hub id or folder of a model.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    max_model_len: Annotated[int, typer.Option(help="Most tokens of prompt and answer.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Serve a model with the embedded sampler until Ctrl-C."""
    from harbortrainer.launch import serve_model

    raise typer.Exit(serve_model(model, port=port, max_model_len=max_model_len, seed=seed))


@tasks_app.command("check")
def tasks_check(
    folder: Annotated[Path, typer.Argument(help="Folder of Harbor tasks.")],
    environment: Annotated[str, typer.Option(help="Where the sandbox runs.")] = "local",
    parallel: Annotated[int, typer.Option(help="Trials at once.")] = 2,
) -> None:
    """Run each task with its oracle and with an agent that does nothing; both must get the reward they should."""
    from harbortrainer.launch import check_tasks

    raise typer.Exit(check_tasks(folder, environment=environment, parallel=parallel))


@config_app.command("upgrade")
def config_upgrade(
    file: Annotated[Path, typer.Argument(help="Run file in an old spelling.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here instead.")] = None,
) -> None:
    """Write a run file in today's spelling, with its comments kept; the old one stays beside it as FILE.old."""
    from harbortrainer.config.legacy import upgrade_file

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
