"""What everyone stands on: profiles, paths, atomic files, manifests and user-facing errors. Imports nothing of the project."""
