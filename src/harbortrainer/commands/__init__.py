"""What each command does, one file a command: it puts the rooms together and returns an exit code.

Contract: nothing is written before everything was checked. Mistakes are `UserError`.
"""
