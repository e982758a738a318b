"""Entry point of the program. Imports nothing before it can end at Ctrl-C without a stack trace."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. Without `arguments`, it takes those of this process."""
    try:
        from harbortrainer.cli import main as run

        return run(arguments)
    except KeyboardInterrupt:
        from harbortrainer.errors import EXIT_INTERRUPTED

        return EXIT_INTERRUPTED
