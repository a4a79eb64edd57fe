"""How much memory and time do precision and recall of large sets of features take?"""

import argparse
import json
import resource
import time

import torch
from timing import log
from tqdm import tqdm

import nidiff


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000, help="features in each of the two sets")
    parser.add_argument("--size", type=int, default=1280, help="numbers in a feature")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    real, generated = (torch.randn(arguments.count, arguments.size, generator=generator) for _ in range(2))
    log(f"two sets of {arguments.count} features of {arguments.size} numbers: {2 * real.nbytes / 2**20:.0f} MiB")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with tqdm(unit=" pairs", unit_scale=True, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = nidiff.metrics.precision_recall(real, generated, progress=progress)
    seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps(
            {
                **found._asdict(),
                "seconds": round(seconds, 1),
                "peak_mib": round(peak / 1024),  # kilobytes on Linux
                "beyond_features_mib": round((peak - before) / 1024),
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
