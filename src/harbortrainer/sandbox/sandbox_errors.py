"""What can go wrong with a sandbox. All of it is infrastructure: it is never the policy's fault and never trains."""


class SandboxError(RuntimeError):
    """Something is wrong with the sandbox itself, not with what runs in it."""


class SandboxStartError(SandboxError):
    """The sandbox could not be started; the message names the step and the kernel's answer."""


class SandboxBuildError(SandboxError):
    """A step of the task's Dockerfile failed; the message names the step and shows the end of its output."""


class SandboxDiedError(SandboxError):
    """The sandbox ended while it was still needed (its first process was killed, for memory most of the time)."""
