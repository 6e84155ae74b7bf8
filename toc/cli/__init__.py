"""The command line: parse, call, print. Commands import slow modules themselves, so that help stays fast."""
