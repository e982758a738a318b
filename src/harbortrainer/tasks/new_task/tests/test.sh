#!/bin/bash
# Runs after the agent. It must always write a reward, also for a wrong solution.
# Bash compares the text itself: the agent could have replaced diff, grep or python.
reward=0
[ "$(</app/errors.txt)" = $'billing 2\nsearch 1' ] && reward=1
echo $reward > /logs/verifier/reward.txt
