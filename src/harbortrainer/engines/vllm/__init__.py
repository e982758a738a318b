"""vLLM as the embedded engine's sampler: `vllm serve` beside the learner, behind a proxy of ours.

    VllmSampler: replaces `engines.local.sampler.Sampler` in the training loop
      VllmProxy: answers the environment servers, and requests the current policy version from vLLM
      VllmProcess: the child process, from start to end

The contract is the sampler's: one policy version samples a whole request, and the completion log has what was sampled.
At vLLM each version is an adapter with a name of its own, so no cache can mix two versions.
"""
