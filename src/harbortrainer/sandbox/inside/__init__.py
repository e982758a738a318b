"""The code that runs in the sandbox's own processes: nothing but the standard library, and nothing imported late.

These modules are started as `python -I -S` by `harbortrainer.sandbox.nursery_client`. Everything is imported before the
root filesystem changes, so that the sandbox needs no Python of its own.
"""
