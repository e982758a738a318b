"""Trust in tasks: by name, by pattern, and the line that a message proposes."""

from harbortrainer.config.trusted_tasks import is_trusted, trust_remedy


def test_trusts_names_and_patterns_only() -> None:
    assert is_trusted("a/b", ["a/b"]) and is_trusted("a/b", ["a/*"]) and is_trusted("a[1]", ["a[1]"])
    assert not is_trusted("a/b", []) and not is_trusted("a/b", ["b", "a", "A/B"])


def test_remedy_names_few_tasks() -> None:
    assert 'add `trusted_tasks = ["a", "b"]` to [warmup]' in trust_remedy(["a", "b"], "warmup")
    assert "pass `--trust 'a b'`" in trust_remedy(["a b"])
    assert "--trust 4 --trust ..." in trust_remedy([str(number) for number in range(1000)])
