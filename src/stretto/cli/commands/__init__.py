"""One module per subcommand: its docstring holds the help text, and its functions are `add_arguments` and `run`."""
