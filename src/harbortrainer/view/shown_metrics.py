"""What of a step's line in `metrics.jsonl` the pages show."""

import re
from collections.abc import Mapping

from harbortrainer.view.trial_store import MetricRow

SHOWN = re.compile(
    r"step|loss|eval/(mean_reward|low|high|n|tasks|stderr)|train/agg/all/agent/(reward/.*|solved_\w+|is_truncated/mean)"
    r"|time/\w+|(staleness|off_policy)/\w+|mismatch_kl/all/\w+|entropy/all/mean|optim/grad_norm|is_masked/mean"
    r"|perf/\w+|progress/\w+|batch/empty|cost/.*|proof/spread|train/agg/all/num_(turns|output_tokens)/mean"
)


def shown_metrics(row: Mapping[str, object]) -> MetricRow | None:
    """The figures that are shown; None for a line without a step."""
    if not isinstance(row.get("step"), int):
        return None
    return {key: value for key, value in row.items() if SHOWN.fullmatch(key)}
