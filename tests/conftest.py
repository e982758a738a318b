"""Its place puts this folder on the path, so that every test can import the shared fakes by name."""

import os

# Without a network LiteLLM would retry the download of its price list for most of a minute.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
# Two threads that wait for each other by spinning made tiny models ten times slower on shared cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
