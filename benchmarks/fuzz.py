"""Ten thousand plan and cluster files of an enemy: each is read or refused with a PartitionerError, within a second and 200 MB.

    python -m benchmarks.fuzz [--files 10000] [--seed 0] [--json out/fuzz.json]

Three quarters are mutations of real plan files (one planned here, one with every field, one in stages), the rest of the cluster presets; a few
are as large as files come. What is read is also printed, explained, compared and written again. Any other exception ends the run with its file.
Seconds are of the processor, bytes the most that the process holds beyond what it held before a file. Exit status 1
where a bar is missed.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.driver_models import planned
from tests.hostile import cluster_files, plan_files, read_cluster, read_plan
from tests.test_fuzz import PLAN, STAGED

SECONDS_BAR, BYTES_BAR = 1.0, 200 * 10**6
Chunks = Callable[[], Iterable[bytes]]
GIANTS: dict[str, Chunks] = {
    "100 MB of blanks": lambda: repeat(b" " * 10_000, 10_000),
    "100 MB of a string": lambda: chain([b'"'], repeat(b"x" * 10_000, 10_000)),
    "lists in lists": lambda: repeat(b"[" * 10_000, 400),
    "objects in objects": lambda: repeat(b'{"a":' * 1000, 800),
    "empty lists": lambda: chain([b"["], repeat(b"[]," * 1000, 1300), [b"[]]"]),
    "empty objects": lambda: chain([b"["], repeat(b"{}," * 1000, 1300), [b"{}]"]),
    "fractions": lambda: chain([b"["], repeat(b"1.5," * 1000, 1000), [b"1]"]),
    "keys": lambda: chain([b"{"], (b'"%d":1,' % i for i in range(300_000)), [b'"":1}']),
    "a long number": lambda: repeat(b"9" * 10_000, 400),
    "as many lists as may be": lambda: chain([b'{"version": 1, "blocks": ['], repeat(b"[],", 49_000), [b"[]]}"]),
    "as many objects as may be": lambda: chain([b'{"version": 1, "blocks": ['], repeat(b"{},", 49_000), [b"{}]}"]),
    "as many constraints as may be": lambda: chain([b'{"version": 1, "constraints": {'], (b'"%d":[],' % i for i in range(49_000)), [b'"":1}}']),
    "as much text as may be": lambda: chain([b'{"version": 1, "model": ["'], repeat(b"\\u0416" * 10, 60_000), [b'"]}']),
    "a TOML of tables": lambda: (b"[a%d]\n" % i for i in range(7000)),
    "a TOML of dots": lambda: chain([b"a"], repeat(b".a", 30_000), [b" = 1"]),
    "a TOML of lines of dots": lambda: (b"a%d%s = 1\n" % (i, b".a" * 199) for i in range(155)),
    "a TOML of lists": lambda: chain([b"a = "], repeat(b"[", 60_000)),
    "a TOML of long keys": lambda: (b"a%d.b.c.d.e.f.g = 1\n" % i for i in range(2800)),
}


class Tally:
    """What became of the files, and the dearest of them."""

    def __init__(self, folder: Path) -> None:
        self.path, self.kinds = folder / "file", Counter[str]()
        self.worst_seconds, self.worst_bytes, self.slowest_file = 0.0, 0, b""

    def read(self, kind: str, reader: Callable[[Path], bool], chunks: Iterable[bytes]) -> None:
        with self.path.open("wb") as file:
            file.writelines(chunks)
        before = held_bytes(forget_peak=True)
        start = time.process_time()
        good = reader(self.path)
        spent = time.process_time() - start
        self.worst_bytes = max(self.worst_bytes, held_bytes() - before)
        self.kinds[f"{kind} {'read' if good else 'refused'}"] += 1
        if spent > self.worst_seconds:
            self.worst_seconds = spent
            with self.path.open("rb") as file:
                self.slowest_file = file.read(80)

    def run(self, kind: str, files: SearchStrategy[bytes], reader: Callable[[Path], bool], count: int, number: int) -> None:
        """`count` files drawn from `files`; the first that fails is shown as small as it can be made."""

        @seed(number)
        @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
        @given(files)
        def each(data: bytes) -> None:
            self.read(kind, reader, [data])

        each()

    def summary(self) -> dict[str, Any]:
        read, refused = (sum(count for kind, count in self.kinds.items() if kind.endswith(word)) for word in ("read", "refused"))
        return {
            "files": read + refused,
            "read": read,
            "refused": refused,
            "by_kind": dict(self.kinds),
            "worst_seconds": round(self.worst_seconds, 3),
            "slowest_file": repr(self.slowest_file),
            "worst_bytes": self.worst_bytes,
        }


def held_bytes(forget_peak: bool = False) -> int:
    """The most that this process has held since it last forgot its peak; elsewhere than on Linux, ever."""
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if forget_peak:
        forget.write_text("5")
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("out/fuzz.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        real = Path(folder) / "plan.json"
        planned(memory=100_000).save(real)
        plans = [real.read_bytes(), PLAN, STAGED]
        real.write_bytes(PLAN)
        assert read_plan(real)
        tally = Tally(Path(folder))
        for chunks in GIANTS.values():
            tally.read("giant", read_plan, chunks())
            tally.read("giant", read_cluster, chunks())
        many = max(0, options.files - 2 * len(GIANTS))
        tally.run("plan", plan_files(plans), read_plan, many * 3 // 4, options.seed)
        tally.run("cluster", cluster_files(), read_cluster, many - many * 3 // 4, options.seed + 1)
        result = tally.summary()
    result["passed"] = result["worst_seconds"] <= SECONDS_BAR and result["worst_bytes"] <= BYTES_BAR
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
