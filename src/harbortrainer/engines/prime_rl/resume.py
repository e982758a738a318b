"""The checkpoint that a Prime-RL run continues from.

Prime-RL takes the newest folder `checkpoints/step_N`. The orchestrator completes its part, `orchestrator/progress.pt`,
when it has sent batch N, and writes one more when it is ended. The trainer completes its part, `trainer/.metadata`,
when it has trained on batch N (src/prime_rl/{orchestrator,trainer}/ckpt.py, 559b44772). After a failure or a signal,
the newest folders therefore lack the trainer's part, or have half of it.

A run that is resumed from an earlier step abandons the later ones. Prime-RL leaves their checkpoints in place, takes
the newest of them at the next resume, and counts them for `keep_last`; so they are renamed.

Invariant: the content of a complete checkpoint is never changed.
"""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.errors import UserError
from harbortrainer.runs.checkpoints import NAME, steps_in


@dataclass(frozen=True)
class Checkpoints:
    """The folders with the checkpoints of a run.

    Args:
        orchestrator: `checkpoints/` in the run's folder.
        trainer: The same folder, unless `[ckpt] output_dir` names another for the trainer.
    """

    orchestrator: Path
    trainer: Path

    @classmethod
    def of(cls, run: PrimeRun) -> Self:
        """Return the folders of a run."""
        named = [table.output_dir for table in (run.ckpt, run.trainer.ckpt) if table and table.output_dir]
        return cls(run.run_dir / "checkpoints", (named[0] if named else run.run_dir) / "checkpoints")

    def newest_whole(self) -> tuple[int | None, list[str]]:
        """Return the newest step that both have completed, None if there is none; and a line for each newer step."""
        lines = []
        for step in sorted({*steps_in(self.orchestrator), *steps_in(self.trainer)}, reverse=True):
            missing = _missing_parts(self.orchestrator / f"step_{step}", self.trainer / f"step_{step}")
            if not missing:
                return step, lines
            lines.append(f"passed over step {step}: {' and '.join(missing)} missing")
        return None, lines

    def named_step(self, resume: Mapping[str, object]) -> int | None:
        """Return the step of the checkpoint that `[resume]` names; None if it names none or an incomplete one."""
        step, folder = resume.get("step"), resume.get("dir")
        if isinstance(folder, str) and (match := NAME.fullmatch(Path(folder).name)):
            return None if _missing_parts(Path(folder), Path(folder)) else int(match[1])
        if isinstance(step, int):
            name = f"step_{step}"
            return None if _missing_parts(self.orchestrator / name, self.trainer / name) else step
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename each checkpoint after `step` to `abandoned_step_N`, so that no later resume takes it; report it."""
        for folder in {self.orchestrator, self.trainer}:
            later = [found for found in steps_in(folder) if found > step]
            for found in later:
                names = (f"abandoned_step_{found}{'' if n == 1 else f'_{n}'}" for n in count(1))
                target = next(folder / name for name in names if not (folder / name).exists())
                (folder / f"step_{found}").rename(target)
            if later:
                what = f"the run branches off at step {step}; renamed its later checkpoints in {folder}"
                print(f"{what}: step_{', step_'.join(map(str, later))} to abandoned_step_...", file=sys.stderr)

    def set_aside(self) -> None:
        """Rename each `step_N` to `incomplete_step_N`, so that Prime-RL does not find it."""
        for folder in {self.orchestrator, self.trainer}:
            for step in steps_in(folder):
                shutil.rmtree(folder / f"incomplete_step_{step}", ignore_errors=True)
                (folder / f"step_{step}").rename(folder / f"incomplete_step_{step}")


def _missing_parts(orchestrator: Path, trainer: Path) -> list[str]:
    """Return the files that complete a checkpoint and do not exist, given its folders."""
    parts = orchestrator / "orchestrator" / "progress.pt", trainer / "trainer" / ".metadata"
    return [str(part) for part in parts if not part.is_file()]


def resume_options(checkpoints: Checkpoints, *, restart: bool) -> list[str]:
    """Choose the checkpoint to continue from, report it, and return the options of `rl`.

    Args:
        checkpoints: The run's checkpoints.
        restart: Whether a run without a complete checkpoint starts from step 1.

    Raises:
        UserError: The run has checkpoints, but none is complete, and this is no restart.
    """
    step, lines = checkpoints.newest_whole()
    print(*lines, sep="\n", end="\n" * bool(lines), file=sys.stderr)
    if step is not None:
        print(f"continuing from step {step}, the newest that trainer and orchestrator both completed", file=sys.stderr)
        return ["--resume.step", str(step)]
    if lines and not restart:
        what = "trainer and orchestrator have no completed checkpoint in common"
        do = "start the run again with --clean instead of --resume, or with another run.name"
        raise UserError(what, where=str(checkpoints.orchestrator), do=do)
    checkpoints.set_aside()
    print("no complete checkpoint: starting from step 1", file=sys.stderr)
    return ["--resume"]
