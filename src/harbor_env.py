"""The verifiers plugin `harbor_env`: Harbor tasks, run as Harbor's own trials, as a verifiers v1 environment.

Importing this module must not import harbor or litellm: it is imported at config validation in the launcher, in
the orchestrator and in every env server.
"""
