"""One module per subcommand: its docstring holds the help text, `add_arguments` and `run` are its code."""
