"""Whether the embedded engine can sample from a model of the policy's kind."""

from collections.abc import Iterator
from importlib.util import find_spec

from harbortrainer.config.runfile import RunConfig
from harbortrainer.doctor.finding import Finding, red
from harbortrainer.doctor.gpus import folders_of
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.errors import UserError
from harbortrainer.runs.loading import loading


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """A finding where it cannot; none where the config is not on this machine, or another engine samples."""
    run = plan.run
    if not isinstance(run, RunConfig) or run.inference.engine == "vllm":
        return
    name, key = (run.warmup.model, "warmup.model") if run.warmup else (run.model.name, "model.name")
    folders = [folder for folder in folders_of(name) if (folder / "config.json").is_file()] if name else []
    if not folders or find_spec("torch") is None:
        return
    loading("the model's config", "transformers")
    from harbortrainer.engines.architectures import need_sampled
    from harbortrainer.engines.pretrained import load_config

    try:
        need_sampled(load_config(folders[0], where=key), str(name), where=key)
    except UserError as error:
        yield red("model", error.what, error.do, plan.where(error.where))
