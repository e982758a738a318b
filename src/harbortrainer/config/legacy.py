"""Old spellings, translated on load."""


def upgrade(text: str, file: str) -> tuple[str, list[str]]:
    """The text in today's spelling, and one line for each thing that was translated (none: nothing was old)."""
    return text, []
