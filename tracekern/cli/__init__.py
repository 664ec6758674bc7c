"""The command line: one file a command, thin over the functions that do the work."""
