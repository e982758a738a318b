"""Checks of vLLM and Prime-RL.

- vLLM: its program, if the run samples with it; otherwise whether it would sample faster.
- Prime-RL: the submodule at its pinned commit, its Python environment, and the plugin's dependencies in it.
"""

import shlex
from collections.abc import Iterator

from harbortrainer.config.environment_table import environment_entry
from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor import gpus
from harbortrainer.doctor.finding import Finding, Level, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.prime_rl.checkout import PIN, Checkout
from harbortrainer.engines.programs import program_output
from harbortrainer.engines.vllm.vllm_process import require_vllm
from harbortrainer.errors import UserError


def check_vllm(plan: LaunchPlan) -> Iterator[Finding]:
    """Check vLLM's release, or propose it as the faster sampler. Prime-RL has its own vLLM, which is not checked."""
    run = plan.run
    if not isinstance(run, RunConfig):
        return
    if run.inference.engine != "vllm":
        if can_use_vllm(plan, run):
            what = "the embedded sampler has no CUDA graphs; vLLM samples faster on a GPU"
            do = 'install vllm and set [inference] engine = "vllm" (docs/gpu.md)'
            yield yellow("vLLM", what, do, plan.where("inference.engine"))
        return
    try:
        program = require_vllm()
    except UserError as error:
        yield red("vLLM", error.what, error.do, plan.where(error.where))
        return
    yield green("vLLM", f"{program.version} samples on the learner's GPU")


def can_use_vllm(plan: LaunchPlan, run: RunConfig) -> bool:
    """Whether vLLM can sample here: it needs a GPU, and a LoRA on an unquantized base that fits twice."""
    if not plan.gpus or run.warmup is not None or run.lora is None or run.model.quantization is not None:
        return False
    return all(finding.level is not Level.RED for finding in gpus.beside_vllm(plan, run))


NEEDED = ("harbor", "litellm", "psutil", "dockerfile_parse", "aiodocker")
"""Packages that the plugin imports. Prime-RL's lock includes harbor; a provider's package is an extra of harbor."""

HARBOR = "harbor{extras}==0.21.0"


def check_prime_rl(plan: LaunchPlan) -> Iterator[Finding]:
    """Check Prime-RL, if the run uses it."""
    if plan.on_prime_rl:
        yield from prime_rl(plan)


def prime_rl(plan: LaunchPlan) -> Iterator[Finding]:
    """Check Prime-RL's source, its environment, and the plugin in it."""
    try:
        plan.checkout.require_installed()
    except UserError as error:
        yield red("Prime-RL", f"{error.what} ({error.where})", error.do)
        return
    yield pinned(plan.checkout)
    yield plugin(plan.checkout, provider_packages(plan))


def provider_packages(plan: LaunchPlan) -> list[str]:
    """Packages of the providers that Harbor supports. A package has the name of its environment type."""
    entries = {kind: environment_entry(kind) for kind in plan.environment_types}
    return [kind for kind, entry in entries.items() if entry.remote and entry.import_path is None]


def pinned(checkout: Checkout) -> Finding:
    """Check that Prime-RL is at the commit that the configs are written for."""
    commit = (program_output("git", "-C", str(checkout.root), "rev-parse", "HEAD") or "").strip()
    if commit == PIN:
        return green("Prime-RL", f"at commit {PIN[:9]}")
    try:
        release = checkout.release
    except UserError as error:
        return red("Prime-RL", f"{error.what} ({error.where})", error.do)
    at = f"at {f'commit {commit[:9]}' if commit else 'an unknown commit'}, expected {PIN[:9]}"
    if release != "pin":
        at += "; its key names are those of newer Prime-RL (September 2026 on). No run was tested with them"
    return yellow("Prime-RL", at, "run `git submodule update`, or see docs/prime-rl.md on newer releases")


def plugin(checkout: Checkout, providers: list[str]) -> Finding:
    """Check that Prime-RL's environment has the packages that the plugin imports."""
    needed = (*NEEDED, *providers)
    code = f"import importlib.util as u; print(*[m for m in {needed!r} if u.find_spec(m) is None])"
    python = checkout.python
    output = program_output(str(python), "-c", code, timeout_s=60)
    missing = "python" if output is None else output.strip()
    if missing:
        package = HARBOR.format(extras=f"[{','.join(providers)}]" if providers else "")
        do = f"run `uv pip install --python {shlex.quote(str(python))} '{package}' psutil dockerfile-parse aiodocker`"
        return red("plugin", f"packages missing in Prime-RL's environment: {missing}", do)
    return green("plugin", "its dependencies are in Prime-RL's environment")
