"""``python -m toc``: the command line."""

from toc.cli.main import run

if __name__ == "__main__":
    run()
