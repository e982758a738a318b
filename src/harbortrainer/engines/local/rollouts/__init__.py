"""From a task to the batch of a step: schedule, rollouts, samples, groups, advantages and batches."""
