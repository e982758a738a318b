"""From a task to the batch that trains: what is played next, groups, their rollouts and samples, batches."""
