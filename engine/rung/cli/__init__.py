"""The `rung` command. Nothing heavy is imported before a command needs it."""
