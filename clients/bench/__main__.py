"""``python -m clients.bench``: ``everstream bench`` without the other commands."""

from clients.bench.cli import main

if __name__ == "__main__":
    main()
