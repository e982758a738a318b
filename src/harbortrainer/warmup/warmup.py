"""From `[warmup]` to a folder with a warmed-up policy: weights, tokenizer and chat template, as transformers saves them.

Invariant: the folder appears whole or not at all.
"""

import random
from pathlib import Path

import torch
from renderers import Qwen3RendererConfig, create_renderer
from transformers import PreTrainedTokenizerFast

from harbortrainer.engines.local.learner.folder import atomic_folder
from harbortrainer.warmup import family, transcripts
from harbortrainer.warmup.config import WarmupConfig
from harbortrainer.warmup.course import Lesson, Progress, run_course
from harbortrainer.warmup.encoding import encode
from harbortrainer.warmup.policy import fresh_policy
from harbortrainer.warmup.supervised import Student
from harbortrainer.warmup.tokenizer import train_tokenizer

READY = 0.7
"""Share of the transcripts in which the shell was ready when the screen was read; it is a race in real trials."""


def warm_up(config: WarmupConfig, out_dir: Path, *, seed: int = 0) -> Path:
    assert config.family is not None
    torch.set_num_threads(1)
    rng = random.Random(seed)
    variants = family.learnable(config.family, config.heldout)
    tokenizer = train_tokenizer(transcripts.transcript(v.name, v.instruction, v.commands) for v in variants)
    lessons = _lessons(variants, tokenizer, rng)
    student = Student(fresh_policy(tokenizer, seed=seed), lr=config.lr, pad=tokenizer.pad_token_id)

    def report(p: Progress) -> None:
        if p.success is not None:
            print(p, flush=True)

    run_course(student, lessons, steps=config.steps, batch_size=config.batch_size, success=config.success, rng=rng, report=report)
    with atomic_folder(out_dir) as folder:
        student.finished().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out_dir


def _lessons(variants: list[family.Variant], tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Lesson]:
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))

    def episode(variant: family.Variant, commands: list[str]):
        ready = rng.random() < READY
        text = transcripts.transcript(family.task_key(variant.instruction), variant.instruction, commands, ready=ready)
        return encode(text, renderer, tokenizer)

    return [Lesson(episode(v, v.commands), episode(v, v.mistake(rng))) for v in variants]
