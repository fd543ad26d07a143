"""Wait until a Ray cluster has so many GPUs: `python wait_for_gpus.py ADDRESS GPUS SECONDS`. Exit status 1 if it has not in time."""

from __future__ import annotations

import sys
import time


def main(address: str, gpus: int, seconds: float) -> int:
    import ray

    deadline = time.monotonic() + seconds
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    while (there := ray.cluster_resources().get("GPU", 0)) < gpus:
        if time.monotonic() >= deadline:
            print(f"wait_for_gpus: {there:g} of {gpus} GPUs have joined {address} in time", file=sys.stderr)
            return 1
        time.sleep(1)
    print(f"{there:g} GPUs at {address}", flush=True)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python wait_for_gpus.py ADDRESS GPUS SECONDS")
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
