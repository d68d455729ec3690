"""``python -m clients.bench``: ``everstream bench`` without the rest of the command."""

from clients.bench.cli import main

if __name__ == "__main__":
    main()
