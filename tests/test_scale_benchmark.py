"""`benchmarks/scale.py` counts an episode without a trace as lost."""

from argparse import Namespace
from pathlib import Path

from scale import Played, judge, row
from verifiers.v1.episode import WireEpisode


def test_episode_without_a_trace_is_lost(tmp_path: Path):
    episode = WireEpisode.model_construct(traces=[])
    played = Played(episodes=[episode], wall_s=1.0)
    verdict = judge(Namespace(turns=3, answer=(1.0, 3.0)), played, tmp_path)
    assert verdict.outcomes == {"no trace": 1} and not verdict.wrong
    assert "1 of 1" in row(1, played, verdict)
