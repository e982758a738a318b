"""transformers' private API: names exist and our overrides are called; another release gives a one-line error."""

import sys
from importlib.metadata import version

import pytest
from sampler_setup import generate
from transformers.generation.continuous_batching.model_runner import ModelRunner

from harbortrainer.engines.batching_internals import PRIVATE_APIS, WRITTEN_FOR
from harbortrainer.engines.local.sampler import Sampler
from harbortrainer.engines.local.sampler.continuous_batching import SamplingArguments, SeededManager, SeededRunner
from harbortrainer.errors import UserError


@pytest.mark.parametrize("place", PRIVATE_APIS.places)
def test_private_api_exists(place):
    PRIVATE_APIS.check_place(place)


def test_transformers_calls_our_overrides(folder, monkeypatch):
    called = set()

    def record_calls(kind: type, name: str) -> None:
        original = getattr(kind, name)
        place = f"{kind.__name__}.{name}"
        monkeypatch.setattr(kind, name, lambda *args, **kwargs: (called.add(place), original(*args, **kwargs))[1])

    hooks = {
        SamplingArguments: ("check_kwargs", "fill_defaults", "prepare_tensor_args"),
        SeededManager: ("_create_batch_processor", "_run_generation_loop", "switch_to_cb_friendly_attn"),
        SeededRunner: ("_sample", "compute_batch", "maybe_pad_inputs"),
    }
    for kind, names in hooks.items():
        for name in names:
            record_calls(kind, name)
    with Sampler(folder, max_model_len=64) as sampler:
        generate(sampler.url, [5, 6], max_tokens=2)
    ours = {f"{kind.__name__}.{name}" for kind, names in hooks.items() for name in names}
    message = f"transformers {version('transformers')} no longer calls what transformers {WRITTEN_FOR} called: "
    assert called == ours, message + ", ".join(sorted(ours - called))


def test_missing_private_api_is_one_line_error_before_loading(folder, monkeypatch):
    package = "harbortrainer.engines"
    monkeypatch.delitem(sys.modules, f"{package}.batching_internals")
    monkeypatch.delattr(f"{package}.batching_internals")
    monkeypatch.delattr(ModelRunner, "_sample")
    with pytest.raises(UserError) as caught:
        Sampler(folder)
    assert str(caught.value) == (
        f"transformers {version('transformers')}: there is no transformers.generation.continuous_batching.model_runner:"
        f"ModelRunner._sample; {package}.batching_internals was written for transformers {WRITTEN_FOR}; "
        f"install transformers {WRITTEN_FOR}.*"
    )
