"""From nothing to a model that RLHF has made better, in a few minutes on two cores: `conveyor quickstart`."""

import os

# Read when torch is loaded. A model this small only loses by being spread over the cores of a large machine.
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, len(os.sched_getaffinity(0)))))
