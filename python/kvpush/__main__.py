"""`python -m kvpush` is the `kvpush` command."""

from kvpush.cli import main

if __name__ == "__main__":
    main()
