"""The command line: parse, call, print. Heavy modules are imported inside commands, so that help is quick."""
