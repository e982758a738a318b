"""The commands of the CLI, one module each. A command returns its exit code; a user's mistake raises `UserError`.

Invariant: a command checks its arguments before it writes anything.
"""
