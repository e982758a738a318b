"""Entry point of the program. Imports nothing before it can end at Ctrl-C without a stack trace."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command with these arguments, or those of this process. Returns its exit code."""
    try:
        from harbortrainer.cli import main as run

        return run(arguments)
    except KeyboardInterrupt:
        from harbortrainer.errors import EXIT_INTERRUPTED

        return EXIT_INTERRUPTED
