"""``python -m outsize`` is the ``outsize`` command."""

from outsize.cli.app import main

if __name__ == "__main__":
    main()
