"""Tasks, tools, agents, verification and episodes: what happens inside one attempt. Imports neither Prefect nor any training library."""
