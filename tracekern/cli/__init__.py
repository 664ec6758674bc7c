"""The command line: one file for each command, thin over the functions that do the work."""
