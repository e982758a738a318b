"""Prime-RL: the submodule at its pin, its environment, and the plugin in it."""

from collections.abc import Iterator

from harbortrainer.config.plugin import is_provider
from harbortrainer.doctor.finding import Finding, green, red, yellow
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.prime_rl.checkout import PIN, Checkout
from harbortrainer.engines.programs import output_of
from harbortrainer.errors import UserError

NEEDED = ("harbor", "litellm", "psutil", "dockerfile_parse", "aiodocker")
"""What the plugin imports. Prime-RL's lock brings harbor along; a provider's own package comes with harbor's extra."""

HARBOR = "harbor[{extras}]==0.21.0"


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Source, environment, plugin."""
    if not plan.on_prime_rl:
        return
    try:
        plan.checkout.need()
    except UserError as error:
        yield red("Prime-RL", f"{error.what} ({error.where})", error.do)
        return
    yield pinned(plan.checkout)
    yield plugin(plan.checkout, [kind for kind in plan.environment_types if is_provider(kind)])


def pinned(checkout: Checkout) -> Finding:
    """Is it the commit that the configs are written for?"""
    commit = (output_of("git", "-C", str(checkout.root), "rev-parse", "HEAD") or "").strip()
    if commit == PIN:
        return green("Prime-RL", f"at {PIN[:9]}")
    do = "run `git submodule update`, or see docs/prime-rl.md on moving the pin"
    return yellow("Prime-RL", f"at {commit[:9] or 'an unknown commit'}, not {PIN[:9]}", do)


def plugin(checkout: Checkout, providers: list[str]) -> Finding:
    """Whether its Python finds what the plugin imports."""
    needed = (*NEEDED, *providers)
    code = f"import importlib.util as u; print(*[m for m in {needed!r} if u.find_spec(m) is None])"
    python = checkout.environment / "bin" / "python"
    said = output_of(str(python), "-c", code, timeout_s=60)
    missing = "python" if said is None else said.strip()
    if missing:
        package = HARBOR.format(extras=",".join(providers if "modal" in providers else ["modal", *providers]))
        do = f"run `uv pip install --python {python} '{package}' psutil dockerfile-parse aiodocker`"
        return red("plugin", f"not in Prime-RL's environment: {missing}", do)
    return green("plugin", "what it imports is in Prime-RL's environment")
