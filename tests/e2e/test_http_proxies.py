"""Proxy variables of the environment do not come between a trial and a local model server."""

from pathlib import Path
from typing import cast

import httpx
import pytest
from fakes import DONE, keys, make_task
from plugin_runs import config, play_one
from scripted_engine import ScriptedEngine, by_turn

from harbortrainer.doctor import machine_checks
from harbortrainer.doctor.finding import Level
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.trials import http_proxies
from harbortrainer.trials.http_proxies import bypass_proxies

DEAD = "127.0.0.1:9"
SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer"), DONE, DONE])


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies on which nothing listens, one of them a SOCKS proxy without its library."""
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://{DEAD}")
    monkeypatch.setenv("http_proxy", f"http://{DEAD}")
    monkeypatch.setenv("ALL_PROXY", f"socks5://{DEAD}")
    monkeypatch.setenv("no_proxy", "internal.example")
    monkeypatch.setenv("NO_PROXY", "internal.example")


@pytest.mark.e2e
@pytest.mark.usefixtures("proxies")
@pytest.mark.parametrize("agent", ["terminus-2", None])
async def test_trial_reaches_its_local_model_server(tmp_path: Path, tokenizer_dir: Path, agent: str | None) -> None:
    make_task(tmp_path / "tasks/t")
    harness = {"agent": agent} if agent else {}
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness)
        trace = await play_one(env, engine)
    assert trace.info["harbor"]["outcome"] == "completed", trace.info["harbor"]["error"]


@pytest.mark.usefixtures("proxies")
def test_only_http_servers_and_this_machine_bypass_proxies() -> None:
    environ = {"HTTPS_PROXY": "http://proxy:1", "NO_PROXY": "a.example"}
    bypass_proxies(["http://model-host:8000/v1", "https://api.example/v1"], environ)
    assert environ["NO_PROXY"] == environ["no_proxy"] == "a.example,localhost,127.0.0.1,::1,model-host"
    unchanged = {"HTTP_PROXY": "http://proxy:1", "no_proxy": "*"}
    bypass_proxies(["http://model-host/v1"], unchanged)
    assert unchanged["no_proxy"] == "*"
    without: dict[str, str] = {}
    bypass_proxies(["http://model-host/v1"], without)
    assert without == {}


@pytest.mark.usefixtures("proxies")
def test_socks_proxy_without_its_library_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match="socksio"):
        httpx.Client()
    environ = {"ALL_PROXY": "socks5://proxy:1", "HTTP_PROXY": "http://proxy:1"}
    bypass_proxies([], environ)
    assert "ALL_PROXY" not in environ
    assert "HTTP_PROXY" in environ
    monkeypatch.setattr(http_proxies.importlib.util, "find_spec", lambda name: object())
    kept = {"ALL_PROXY": "socks5://proxy:1"}
    bypass_proxies([], kept)
    assert kept["ALL_PROXY"] == "socks5://proxy:1"


@pytest.mark.usefixtures("proxies")
def test_doctor_says_what_goes_through_proxies() -> None:
    ignored, used = machine_checks.check_proxies(cast("LaunchPlan", None))
    assert (ignored.level, used.level) == (Level.YELLOW, Level.GREEN)
    assert ignored.what.startswith("ALL_PROXY: ")
    assert used.what.startswith("through HTTP_PROXY, http_proxy go the hub")
