"""vLLM as the embedded engine's sampler: `vllm serve` beside the learner, and ours in front of it.

    VllmSampler: what the loop works with, in the place of `engines.local.sampler.Sampler`
      PolicyFront: answers the environment servers, and asks vLLM for the policy version that is current
      VllmProcess: the child, from its start to its end

Its contract is the sampler's: one request is one policy version, and the ledger has what was really sampled. Each
version is an adapter of a name of its own at vLLM, so that a request names its version and no cache can mix two.
"""
