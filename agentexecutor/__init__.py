"""The command line: parses, calls a flow or a step function, prints. No logic lives here."""
