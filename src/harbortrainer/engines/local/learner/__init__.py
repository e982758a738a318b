"""The learner: GRPO with Prime-RL's loss, on a LoRA or on all weights, in torch and peft.

`Learner.train(samples)` (in `learner.learner`) is one step of Prime-RL's trainer: it turns samples into a new policy
version. The modules here import nothing from the sampler, the loop or the environment. This file has no imports, so
that `training_sample` works without torch.
"""
