"""The learner: GRPO on LoRA weights, with Prime-RL's loss, in torch and peft.

Samples go in, a new policy version comes out: `Learner.train(samples)` (in `learner.learner`) is one step
of Prime-RL's trainer. The modules here import nothing of the sampler, the loop or the environment. This
file imports nothing at all, so that samples can be had where torch is not installed.
"""
