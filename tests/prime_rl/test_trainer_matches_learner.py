"""Prime-RL's trainer and the embedded learner make the same updates from the same batches, for each loss of both."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from batch_files import micro_batches
from conftest import PrimeRL, trainer_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harbortrainer.config.trainer_table import DefaultLoss, IpoLoss, LoraSettings, LossSettings, OptimSettings
from harbortrainer.engines.local.learner.learner import Learner
from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.learner.version_history import VersionHistory

pytestmark = pytest.mark.prime_rl

SEQ_LEN, SAMPLES = 128, 12
LORA = LoraSettings(rank=4, alpha=32)
OPTIM = OptimSettings(lr=1e-2, weight_decay=0.0)
# A random model's probabilities are small, so that only narrow trust regions mask tokens.
REGION, KL_TAU = 1e-3, 0.05
LOSSES = [
    (
        DefaultLoss(dppo_mask_low=REGION, dppo_mask_high=REGION, kl_tau=KL_TAU),
        {"type": "default", "dppo_mask_low": REGION, "dppo_mask_high": REGION, "kl_tau": KL_TAU},
    ),
    (IpoLoss(eps=REGION, kl_tau=KL_TAU), {"type": "ipo", "ipo_threshold": REGION, "kl_tau": KL_TAU}),
]


def batch(policy: Path, seed: int) -> list[Sample]:
    """Return random sequences with the log-probabilities of the base model, which is version 0."""
    random = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    samples = []
    for _ in range(SAMPLES):
        length = int(torch.randint(20, 60, (), generator=random))
        ids = torch.randint(3, model.config.vocab_size, (1, length), generator=random)
        mask = (torch.rand(length, generator=random) < 0.5).tolist()
        mask[:2] = False, True
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        masked = [logprob * trained for logprob, trained in zip([0.0, *logprobs], mask, strict=True)]
        advantage = float(torch.randn((), generator=random))
        samples.append(Sample(ids[0].tolist(), mask, masked, [0] * length, 1.0, advantage))
    return samples


def rows_of(samples: list[Sample]) -> list[dict]:
    """Return the samples as Prime-RL's `TrainingSample`s."""
    return [
        {
            "token_ids": s.token_ids,
            "mask": s.mask,
            "logprobs": s.logprobs,
            "temperatures": [s.temperature] * len(s),
            "env_name": "made",
            "advantages": [s.advantage] * len(s),
        }
        for s in samples
    ]


@pytest.fixture(scope="module")
def batches(prime_rl: PrimeRL, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list, Path]:
    """Two batches, and a folder with what Prime-RL's own packing makes of them."""
    folder, made = tmp_path_factory.mktemp("batches"), [batch(policy, seed) for seed in (1, 2)]
    files = [folder / f"samples_{step}.json" for step in (1, 2)]
    for file, samples in zip(files, made, strict=True):
        file.write_text(json.dumps(rows_of(samples)))
    words = [SEQ_LEN, folder, *files]
    program = Path(__file__).with_name("write_batch.py")
    subprocess.run([prime_rl.python, program, *map(str, words)], env=prime_rl.variables(), check=True)
    return made, folder / "rollouts"


def adapter(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the trainer's adapter, under peft's names."""
    tensors = load_file(run / f"broadcasts/step_{step}/adapter_model.safetensors")
    return {f"base_model.model.{name}": tensor.float() for name, tensor in tensors.items()}


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def new_learner(policy: Path, loss: LossSettings, start: dict[str, torch.Tensor]) -> Learner:
    """Return a learner whose version 0 has this adapter."""
    learner = Learner(policy, LORA, OPTIM, loss, seq_len=SEQ_LEN)
    assert start.keys() == learner.weights(0).keys()
    learner._policy.set_weights(start)
    learner._history = VersionHistory(9, learner._policy.weights())
    return learner


@pytest.mark.parametrize(("loss", "table"), LOSSES, ids=["default", "ipo"])
def test_two_updates_match(
    prime_rl: PrimeRL, policy: Path, batches: tuple[list, Path], tmp_path: Path, loss: LossSettings, table: dict
) -> None:
    shutil.copytree(batches[1], tmp_path / "rollouts")
    config = trainer_config(tmp_path, policy, steps=2, seq_len=SEQ_LEN, loss=table, optim=OPTIM.model_dump())
    log = tmp_path / "trainer.log"
    assert prime_rl.start("float32-trainer", config, log).wait(300) == 0, log.read_text()[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    learner = new_learner(policy, loss, before := adapter(tmp_path, 0))
    for step, samples in enumerate(batches[0], start=1):
        theirs = {key: value for line in lines if line["step"] == step for key, value in line.items()}
        ours = learner.train(samples)
        parts = len(micro_batches(tmp_path, step))
        assert parts > 1, "the trainer's loss is the mean of its micro batches, ours is their sum"
        assert ours["loss"] == pytest.approx(theirs["loss/mean"] * parts, rel=1e-4, abs=1e-6)
        for name in ("entropy/all/mean", "optim/grad_norm", "mismatch_kl/all/mean", "is_masked/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
        after = adapter(tmp_path, step)
        moves = [flat(weights) - flat(before) for weights in (dict(learner.weights(step)), after)]
        # AdamW's first updates depend on the gradients' signs, and rounding decides the sign of the smallest gradients.
        assert torch.cosine_similarity(*moves, dim=0) > 0.9999
        assert moves[0].norm() == pytest.approx(moves[1].norm().item(), rel=1e-4)
        before = after
    assert 0.1 < ours["is_masked/mean"] < 0.9, "the second batch was sampled by an older policy"
