"""The command `harbortrainer tasks` and its sub-commands, and the options that other commands share with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harbortrainer.cli_help import examples
from harbortrainer.config.plugin import NEAR_COPY, TasksetKeys

if TYPE_CHECKING:
    from harbortrainer.tasks.task_subset import TaskSubset

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
IncludeOption = Annotated[
    list[str] | None, typer.Option(help="Shell pattern for task names; only matching tasks are used. Repeatable.")
]
ExcludeOption = Annotated[list[str] | None, typer.Option(help="Shell pattern for task names to leave out. Repeatable.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Most tasks to use, by name.")]
ShardOption = Annotated[str | None, typer.Option(metavar="I/N", help="Use the I-th of N disjoint parts, e.g. 1/4.")]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Exit code 0 although tasks that cannot be used were left out.")
]


def subset_of(context: typer.Context) -> "TaskSubset":
    """Return the tasks that a command's options select."""
    from harbortrainer.tasks.task_subset import TaskSubset

    given = context.params
    return TaskSubset(given["include"] or (), given["exclude"] or (), given["shard"], given["limit"], given["skip_bad"])


@tasks_app.command("new", epilog=examples("tasks new"))
def tasks_new(folder: Annotated[Path, typer.Argument(help="Folder to write, e.g. my-tasks/first.")]) -> None:
    """Write a first task: a working example that passes `tasks check`."""
    from harbortrainer.commands.new_task import new_task

    raise typer.Exit(new_task(folder))


AUDIT_HELP = "Check tasks, and search for answers that leak. Also tries guesses and spoiled solutions."


@tasks_app.command("audit", help=AUDIT_HELP, epilog=examples("tasks audit"))
@tasks_app.command("check", epilog=examples("tasks check"))
def tasks_check(
    context: typer.Context,
    tasks: TasksArgument,
    environment: Annotated[str, typer.Option(help="Sandbox type: local, docker, ...")] = "local",
    environment_kwarg: EnvironmentKwargOption = None,
    trust: TrustOption = None,
    parallel: Annotated[int, typer.Option(min=1, help="Tasks to check in parallel.")] = 2,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Oracle trials per task; rewards that differ are a failure. 3, or 6 in an audit."),
    ] = None,
    cheats: Annotated[str, typer.Option(help="Cheating agents to run: all, none, or NAME,NAME.")] = "all",
    reward_key: Annotated[str | None, typer.Option(help="Key of the rewards to train on, as in the run file.")] = None,
    leftovers: Annotated[str, typer.Option(help="Processes left by the agent before grading: keep, or kill.")] = "keep",
    benchmark: Annotated[
        list[str] | None, typer.Option(help="Folder or source whose copies are reported. Repeatable.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder to keep the trials in.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip tasks with a verdict of an earlier check.")] = False,
    json: Annotated[Path | None, typer.Option(help="JSON file to write all trials to.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Markdown file to write a table to.")] = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """Check tasks with oracle, no-op and cheating agents. The oracle must get the top reward, the others must not."""
    from harbortrainer.commands.check_tasks import CheckPlan, SandboxOptions, check_tasks

    audit = context.info_name == "audit"
    plan = CheckPlan(
        repeats=repeats or (6 if audit else 3),
        audit=audit,
        benchmarks=benchmark or (),
        cheats=cheats,
        reward_key=reward_key,
        leftovers=leftovers,
        parallel=parallel,
        keep=keep,
        resume=resume,
        json=json,
        markdown=markdown,
    )
    where = SandboxOptions(environment, environment_kwarg or [], trust or [])
    raise typer.Exit(check_tasks(tasks, subset_of(context), where, plan))


@tasks_app.command("list", epilog=examples("tasks list"))
def tasks_list(
    context: typer.Context,
    tasks: TasksArgument,
    difficulty: Annotated[Path | None, typer.Option(help="Pass rates, as `eval --difficulty` writes them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """List tasks with requirements, checks and pass rates. Shows access to this machine too."""
    from harbortrainer.commands.tasks import list_tasks

    raise typer.Exit(list_tasks(tasks, subset_of(context), difficulty=difficulty, as_json=as_json))


@tasks_app.command("fetch", epilog=examples("tasks fetch"))
def tasks_fetch(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="Folder, parquet file, NAME@VERSION of Harbor's registry, https://HOST/ORG/REPO@COMMIT#FOLDER, "
            "hf:ORG/NAME@REVISION, or registry.json#NAME@VERSION."
        ),
    ],
    to: Annotated[Path | None, typer.Option(help="Folder to copy the tasks and their lock file to.")] = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """Download a task set. Prints the line that pins it in a run file."""
    from harbortrainer.commands.tasks import fetch_tasks

    raise typer.Exit(fetch_tasks(source, subset_of(context), to))


@tasks_app.command("split", epilog=examples("tasks split"))
def tasks_split(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder of Harbor tasks.")],
    eval_share: Annotated[float, typer.Option(min=0.001, max=0.999, help="Share of tasks to hold out.")] = 0.2,
    near_copy: NearCopyOption = NEAR_COPY,
    write: Annotated[
        bool, typer.Option("--write", help="Save the split to FOLDER/split.json so future tasks keep it.")
    ] = False,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """Show the train/eval split of a folder. Near copies are kept on one side."""
    from harbortrainer.commands.tasks import split_tasks

    raise typer.Exit(split_tasks(folder, subset_of(context), eval_share=eval_share, near_copy=near_copy, write=write))


@tasks_app.command("overlap", epilog=examples("tasks overlap"))
def tasks_overlap(
    context: typer.Context,
    trained: Annotated[str, typer.Argument(help="Folder or source of the training tasks.")],
    held_out: Annotated[str, typer.Argument(help="Folder or source of the evaluation tasks.")],
    near_copy: NearCopyOption = NEAR_COPY,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    limit: LimitOption = None,
    shard: ShardOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """List held-out tasks that copy training tasks. Near copies count; exit code 1 if there are any."""
    from harbortrainer.commands.tasks import show_overlap

    raise typer.Exit(show_overlap(trained, held_out, subset_of(context), near_copy=near_copy))
