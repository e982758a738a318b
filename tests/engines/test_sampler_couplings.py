"""What we use of transformers' private side: it is there, it is called, and a release without it is one sentence."""

import sys
from importlib.metadata import version

import pytest
from sampler_setup import generate
from tiny_model import build_tiny_model
from transformers.generation.continuous_batching.model_runner import ModelRunner

from harbortrainer.engines.batching_internals import COUPLINGS, WRITTEN_FOR
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import DrawArguments, SeededManager, SeededRunner
from harbortrainer.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("place", COUPLINGS.places)
def test_the_place_is_as_it_was(place):
    COUPLINGS.check_place(place)


def test_transformers_calls_what_we_put_in_its_way(folder, monkeypatch):
    called = set()

    def watch(kind: type, name: str) -> None:
        plain = getattr(kind, name)
        place = f"{kind.__name__}.{name}"
        monkeypatch.setattr(kind, name, lambda *args, **kwargs: (called.add(place), plain(*args, **kwargs))[1])

    hooks = {
        DrawArguments: ("check_kwargs", "fill_defaults", "prepare_tensor_args"),
        SeededManager: ("_create_batch_processor", "_run_generation_loop", "switch_to_cb_friendly_attn"),
        SeededRunner: ("_sample", "compute_batch", "maybe_pad_inputs"),
    }
    for kind, names in hooks.items():
        for name in names:
            watch(kind, name)
    with Sampler(folder, max_model_len=64) as sampler:
        generate(sampler.url, [5, 6], max_tokens=2)
    ours = {f"{kind.__name__}.{name}" for kind, names in hooks.items() for name in names}
    told = f"transformers {version('transformers')} no longer calls what transformers {WRITTEN_FOR} called: "
    assert called == ours, told + ", ".join(sorted(ours - called))


def test_a_release_in_which_a_place_is_gone_is_one_sentence_before_anything_is_loaded(folder, monkeypatch):
    room = "harbortrainer.engines"
    monkeypatch.delitem(sys.modules, f"{room}.batching_internals")
    monkeypatch.delattr(f"{room}.batching_internals")
    monkeypatch.delattr(ModelRunner, "_sample")
    with pytest.raises(UserError) as caught:
        Sampler(folder)
    assert str(caught.value) == (
        f"transformers {version('transformers')}: there is no transformers.generation.continuous_batching.model_runner:"
        f"ModelRunner._sample; {room}.batching_internals was written for transformers {WRITTEN_FOR}; "
        f"install transformers {WRITTEN_FOR}.*"
    )
