"""One attempt at a run: `rl` from its start to its end, watched, cleaned up after, and its failure told."""

import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.config.plugin import is_provider
from harbortrainer.config.prime_rl_run import PrimeRun, plugin_envs
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.prime_rl.cleanup import clean_up
from harbortrainer.engines.prime_rl.command import build, environment
from harbortrainer.engines.prime_rl.failure_report import child_that_failed, report, standstill_report
from harbortrainer.engines.prime_rl.lookout import Lookout
from harbortrainer.engines.prime_rl.process import Child
from harbortrainer.engines.prime_rl.remote import end_remote
from harbortrainer.errors import EXIT_STOPPED

LOG = "job_rl.log"
"""Name of the log in the run's folder; one that Prime-RL does not take for an artifact of an earlier run."""


@dataclass(frozen=True)
class Attempt:
    """What every attempt at a run has in common.

    Args:
        run: The run as Prime-RL reads it.
        checkout: Prime-RL.
        file: The run file that `rl` gets.
        options: Further words for `rl`.
        longest_s: The longest that an episode may take, None where nothing bounds it.
        watched: Whether its processes are on this machine.
        resumable: Whether there will be checkpoints.
        kinds: Providers whose sandboxes are looked for at the end.
    """

    run: PrimeRun
    checkout: Checkout
    file: Path
    options: Sequence[str]
    longest_s: float | None
    watched: bool
    resumable: bool
    kinds: Sequence[str]

    def play(self, *, resume: bool, grace_s: float) -> tuple[int, bool]:
        """Run `rl` to its end; its exit code (1 for 0 when it stood still), and whether a signal ended it."""
        run_dir = self.run.run_dir
        identity = f"{self.run.run.name}-{uuid.uuid4().hex[:8]}"
        variables = environment(self.checkout, run=identity, trials=run_dir.resolve() / "trials")
        words = build(self.checkout, self.file, [*self.options, *["--resume"] * resume])
        look = Lookout(identity, run_dir, self.longest_s).look if self.watched else None
        child = Child(words, variables, run_dir / LOG, grace_s=grace_s, look=look)
        try:
            code = child.run()
        finally:
            self._clean_up(identity)
        if child.standstill is not None:
            code = code or EXIT_STOPPED
        if code and not child.interrupted:
            print(self._failure(child, code), file=sys.stderr)
        return code, child.interrupted

    def _failure(self, child: Child, code: int) -> str:
        """A child of `rl` that failed explains why workers are gone."""
        log = self.run.run_dir / LOG
        if child.standstill is None or child_that_failed(child.tail) is not None:
            return report(self.run.run_dir, child.tail, log, code)
        return standstill_report(child.standstill, log, resumable=self.resumable)

    def _clean_up(self, identity: str) -> None:
        left = clean_up(identity)
        told = [str(left), *end_remote(identity, self.kinds, self.checkout.environment / "bin" / "python")]
        print(*filter(None, told), sep="\n", end="\n" * any(told), file=sys.stderr)


def providers(run: PrimeRun, file: str) -> list[str]:
    """Where the sandboxes of a run are started, other than on this machine."""
    harnesses = [env.agent.harness for env in plugin_envs(run, file).values()]
    kinds = dict.fromkeys(harness.environment_type for harness in harnesses if harness is not None)
    return [kind for kind in kinds if is_provider(kind)]
