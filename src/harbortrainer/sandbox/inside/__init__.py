"""Code that runs in the sandbox's own processes. Standard library only, no late imports.

`harbortrainer.sandbox.fork_server_client` starts these modules with `python -I -S`. All imports happen before the root
filesystem changes, so the sandbox does not need Python.
"""
