"""The command line: what each command takes and prints. The work itself is done by the other subpackages."""
