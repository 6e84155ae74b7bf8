"""``toc`` and ``python -m toc``: the command line, if what it needs is installed."""

import sys


def run() -> None:
    """Run the command line; without the extra ``worker``, exit with 2 and say what to install."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as exc:
        print(f"the toc command needs {exc.name}: pip install 'timeout-center[worker]'", file=sys.stderr)
        sys.exit(2)
    from toc.cli.main import run as command_line

    command_line()


if __name__ == "__main__":
    run()
