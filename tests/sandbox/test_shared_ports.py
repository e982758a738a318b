"""Detection of ports in a task's files that concurrent trials would share."""

import pytest

from harbortrainer.sandbox.named_ports import named_ports
from harbortrainer.sandbox.task_requirements import TaskRequirements


@pytest.mark.parametrize(
    ("file", "text", "ports"),
    [
        ("instruction.md", "Serve it at http://localhost:8080/.", [8080]),
        ("tests/test_it.py", 'HTTPServer(("127.0.0.1", 18080), H)', [18080]),
        ("tests/nested/start.sh", "python3 -m uvicorn app:app --port 9000 &\nredis-server --port=6380", [6380, 9000]),
        ("solution/solve.sh", "curl 0.0.0.0:5000", [5000]),
        ("steps/one/tests/test.sh", "curl 127.0.0.1:7000", [7000]),
        ("environment/Dockerfile", "EXPOSE 8080\nENV AT=localhost:8080", []),
        ("instruction.md", "At 10:8080 the year 2024 began; see example.com:8080.", []),
        ("tests/data.bin", "localhost:99999 localhost:1000", []),
    ],
)
def test_finds_localhost_ports(tmp_path, file, text, ports):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert named_ports(tmp_path) == ports


@pytest.mark.parametrize(
    ("toml", "kind", "expected"),
    [
        ("", "local", [8080]),
        ('[environment]\nnetwork_mode = "no-network"', "local", []),
        ("[environment]\nallow_internet = false", "local", []),
        ("", "docker", []),
    ],
)
def test_reports_ports_only_on_shared_network(tmp_path, toml, kind, expected):
    (tmp_path / "task.toml").write_text(toml)
    (tmp_path / "instruction.md").write_text("Serve it at localhost:8080.")
    assert TaskRequirements(tmp_path).shared_ports(kind, {"network": "host"}) == expected
    assert TaskRequirements(tmp_path).shared_ports(kind, {"network": "own"}) == []
