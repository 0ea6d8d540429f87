"""Where commands run: one protocol, and the backends `local` (bubblewrap), `e2b` (cloud) and `mock` (in memory)."""
