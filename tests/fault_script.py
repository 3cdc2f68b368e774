"""`python -m tests.fault_script FAULT`: three steps on all ranks, then rank 1 meets the fault in its own code, and the others go on."""

import os
import sys

from tests import fault_ranks


def main() -> None:
    parallel = fault_ranks.model()
    for number in range(6):
        if number == 3 and os.environ["RANK"] == "1":
            getattr(fault_ranks, sys.argv[1])()
        fault_ranks.step(parallel)


if __name__ == "__main__":
    main()
