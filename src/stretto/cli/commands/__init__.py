"""One module per subcommand: its docstring is the help text, `add_arguments` and `run` are its code."""
