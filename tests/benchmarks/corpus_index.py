"""How fast a 1 GB corpus is checked and indexed, and what memory of its own a process needs for it.

    python tests/benchmarks/corpus_index.py [--megabytes 1000]

Lines of 99 bytes, half of them in two-byte characters; then the same file as one document. Memory
is the process' anonymous memory (RssAnon, Linux): the mapped file itself is shared and not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import llm_ddp_parallel_training as ddp

LINE = b"x" * 50 + "ä".encode() * 22 + b" end\n"


def private_mb() -> float:
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        with open(path, "wb") as file:
            for _ in range(megabytes):
                file.write(LINE * (1_000_000 // len(LINE)))
        size = path.stat().st_size / 1e6
        for kind in ("lines", "document"):
            flags = ["--cpu", "--corpus-file", str(path), "--corpus-format", kind]
            before, begin = private_mb(), time.perf_counter()
            data = ddp.build_data(ddp.parse_settings(flags))
            seconds = time.perf_counter() - begin
            print(
                f"{kind:9} {size:,.0f} MB in {seconds:.1f} s, {size / seconds:,.0f} MB/s, "
                f"private memory +{private_mb() - before:.0f} MB ({data.summary})"
            )
            begin = time.perf_counter()
            next(iter(ddp.EpochSampler(len(data.train), 0)))
            print(f"{'':9} order of an epoch: {time.perf_counter() - begin:.2f} s")


if __name__ == "__main__":
    main()
