"""The `semel` command: one file per subcommand."""
