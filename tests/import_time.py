"""What `import chairlift_client` costs on top of `import redis.asyncio`: a script that prints medians in ms.

Each figure is from a fresh process; the promise is at most 50 ms on an otherwise idle machine.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

RUNS = 15
CODE = (
    "from time import perf_counter, process_time as cpu\n"
    "import redis.asyncio\n"
    "wall_s, cpu_s = perf_counter(), cpu()\n"
    "import chairlift_client\n"
    "print(perf_counter() - wall_s, cpu() - cpu_s)\n"
)


def main() -> None:
    """Measures and prints."""
    runs = [
        subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True) for _ in range(RUNS)
    ]
    figures = [[1000 * float(word) for word in run.stdout.split()] for run in runs]
    wall_ms, cpu_ms = (median(column) for column in zip(*figures, strict=True))
    print(f"import chairlift_client after redis.asyncio: {wall_ms:.1f} ms, of which {cpu_ms:.1f} ms CPU")


if __name__ == "__main__":
    main()
