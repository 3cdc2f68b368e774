"""`python -m partitioner`: the command line."""

from partitioner.cli import main

if __name__ == "__main__":
    main()
