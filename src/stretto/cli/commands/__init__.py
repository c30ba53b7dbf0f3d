"""One module per subcommand, each with a `run(arguments)`."""
