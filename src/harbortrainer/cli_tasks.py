"""The command `harbortrainer tasks` and its sub-commands, and the options that other commands share with it."""

from pathlib import Path
from typing import Annotated

import typer

from harbortrainer.config.plugin import NEAR_COPY, TasksetKeys

tasks_app = typer.Typer(
    help="Write, check, list, fetch and split Harbor tasks.", no_args_is_help=True, rich_markup_mode=None
)

DEFAULT_TASKS: Path = TasksetKeys.model_fields["tasks_dir"].default
TASKS_HELP = "Folder of Harbor tasks, or any source that `tasks fetch` accepts."
TasksArgument = Annotated[str, typer.Argument(help=TASKS_HELP)]
NearCopyOption = Annotated[
    float, typer.Option(min=0.01, max=1, help="Text similarity from which two tasks count as near copies.")
]
EnvironmentKwargOption = Annotated[
    list[str] | None,
    typer.Option("--environment-kwarg", "--ek", help="Sandbox option as NAME=VALUE, e.g. image=host. Repeatable."),
]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(help="Task (name or pattern) that may access this machine's files and secrets. Repeatable."),
]


@tasks_app.command("new")
def tasks_new(folder: Annotated[Path, typer.Argument(help="Folder to write, e.g. my-tasks/first.")]) -> None:
    """Write a first task: a working example that passes `tasks check`."""
    from harbortrainer.commands.new_task import new_task

    raise typer.Exit(new_task(folder))


@tasks_app.command("check")
def tasks_check(
    tasks: TasksArgument,
    environment: Annotated[str, typer.Option(help="Sandbox type: local, docker, ...")] = "local",
    environment_kwarg: EnvironmentKwargOption = None,
    trust: TrustOption = None,
    parallel: Annotated[int, typer.Option(help="Tasks to check in parallel.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Oracle trials per task; rewards that differ are a failure.")] = 3,
    cheats: Annotated[str, typer.Option(help="Cheating agents to run: all, none, or NAME,NAME.")] = "all",
    reward_key: Annotated[str | None, typer.Option(help="Key of the rewards to train on, as in the run file.")] = None,
    leftovers: Annotated[str, typer.Option(help="Processes left by the agent before grading: keep, or kill.")] = "keep",
    keep: Annotated[Path | None, typer.Option(help="Folder to keep the trials in.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip tasks that passed before.")] = False,
    json: Annotated[Path | None, typer.Option(help="JSON file to write all trials to.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Markdown file to write a table to.")] = None,
) -> None:
    """Run each task with its oracle, with an agent that does nothing, and with cheating agents."""
    from harbortrainer.commands.check_tasks import CheckPlan, SandboxOptions, check_tasks

    plan = CheckPlan(
        repeats=repeats,
        cheats=cheats,
        reward_key=reward_key,
        leftovers=leftovers,
        parallel=parallel,
        keep=keep,
        resume=resume,
        json=json,
        markdown=markdown,
    )
    raise typer.Exit(check_tasks(tasks, SandboxOptions(environment, environment_kwarg or [], trust or []), plan))


@tasks_app.command("list")
def tasks_list(
    tasks: TasksArgument,
    difficulty: Annotated[Path | None, typer.Option(help="Pass rates, as `eval --difficulty` writes them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List tasks with their requirements, their access to this machine, checks and pass rates."""
    from harbortrainer.commands.tasks import list_tasks

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
    to: Annotated[Path | None, typer.Option(help="Folder to copy the tasks and their lock file to.")] = None,
) -> None:
    """Download a task set and print the line that pins it in a run file."""
    from harbortrainer.commands.tasks import fetch_tasks

    raise typer.Exit(fetch_tasks(source, to))


@tasks_app.command("split")
def tasks_split(
    folder: Annotated[Path, typer.Argument(help="Folder of Harbor tasks.")],
    eval_share: Annotated[float, typer.Option(min=0.001, max=0.999, help="Share of tasks to hold out.")] = 0.2,
    near_copy: NearCopyOption = NEAR_COPY,
    write: Annotated[
        bool, typer.Option("--write", help="Save the split to FOLDER/split.json so future tasks keep it.")
    ] = False,
) -> None:
    """Show the train/eval split of a folder. Near copies are kept on one side."""
    from harbortrainer.commands.tasks import split_tasks

    raise typer.Exit(split_tasks(folder, eval_share=eval_share, near_copy=near_copy, write=write))


@tasks_app.command("overlap")
def tasks_overlap(
    trained: Annotated[str, typer.Argument(help="Folder or source of the training tasks.")],
    held_out: Annotated[str, typer.Argument(help="Folder or source of the evaluation tasks.")],
    near_copy: NearCopyOption = NEAR_COPY,
) -> None:
    """List evaluation tasks that are copies or near copies of training tasks. Exit code 1 if there are any."""
    from harbortrainer.commands.tasks import show_overlap

    raise typer.Exit(show_overlap(trained, held_out, near_copy=near_copy))
